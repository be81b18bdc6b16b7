"""What a pool keeps: nothing. A folder for its tickets while it lasts, and a journal that writes nothing.

The user's own loop owns the model, so there is no checkpoint to resume from and no ledger to audit.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any, NoReturn

import msgspec

from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.ledger_records import Record
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger import Ledger
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.durable.step_log import Logged


class TemporaryFolder(RunFolder):
    """The folder of a pool, which only its owner can read, and which goes with the pool."""

    def __init__(self, settings: Settings) -> None:
        self._parent = tempfile.mkdtemp(prefix="w5xde-pool-")
        try:
            super().__init__(msgspec.structs.replace(settings, runs=self._parent), "pool")
        except BaseException:
            shutil.rmtree(self._parent, ignore_errors=True)
            raise

    def metrics(self, row: dict[str, Any]) -> None:
        """Nothing: a script that runs for weeks must not fill the disk."""

    def trace(self, row: dict[str, Any]) -> None:
        """Nothing, as with metrics."""

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._parent, ignore_errors=True)

    def discard(self) -> None:
        self.close()


def _cannot_capture() -> NoReturn:
    raise ValueError("a pool has no checkpoints")


class NoJournal(Journal):
    """A journal that keeps no record."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(Ledger(folder.disk, time.time), _cannot_capture, keep=1, logs_steps=False)

    def begin(self, records: list[Record], version: int, last: Logged | None = None) -> None: ...
    def saw(self, event: ev.Event, effects: list[ev.Effect]) -> None: ...
    def record(self, record: Record) -> None: ...
    def tick(self, now: float) -> None: ...
    def stop(self, last: Record) -> None: ...
