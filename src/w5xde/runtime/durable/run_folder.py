"""The run folder: what is kept of a run, readable by anybody without w5xde.

runs/NAME/manifest.json       what was run: settings, versions, model, result
runs/NAME/metrics.jsonl       one object every moment: step, loss, rates, nodes
runs/NAME/ledger-*.jsonl      every event, chained: who joined, was lent what, gave what (see ledger.py)
runs/NAME/checkpoints/        where the run can go on from (see store.py)
runs/NAME/steps-*.log         with --durability step: what was applied since (see steplog.py)
runs/NAME/tickets.json        who may join; of secrets only their hashes (see tickets.py)
runs/NAME/lock                which process owns it
runs/NAME/model.safetensors   the trained weights
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

import w5xde
from w5xde.config import Settings
from w5xde.errors import StorageError
from w5xde.runs import MANIFEST, MODEL, free_name, read_manifest
from w5xde.runtime.durable.disk import RealDisk, replace
from w5xde.runtime.durable.lock import RunLock
from w5xde.sanitize import harmless, to_json


class Recorder:
    """Owns one run's folder: a new one, or with `settings.resume` that of an earlier run."""

    def __init__(self, settings: Settings, job_name: str) -> None:
        self.is_resumed = settings.resume is not None
        stem = f"{harmless(job_name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.name = settings.name or free_name(Path(settings.runs), stem)
        self.folder = Path(settings.runs) / self.name
        if not self.is_resumed:
            self._make_folder()
        self._lock = RunLock(self.folder)
        self.disk = RealDisk(self.folder)
        self._facts: dict[str, Any] = {
            "run": self.name,
            # Unlike its name it is no other run's, wherever that is: keys are kept by it.
            "id": secrets.token_hex(8),
            "w5xde": w5xde.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "settings": msgspec.to_builtins(settings),
        }
        if self.is_resumed:
            # How an earlier life ended says nothing of this one.
            before = read_manifest(self.folder)
            kept = {key: before[key] for key in before.keys() - {"result", "reason", "ledger"}}
            self._facts = kept | self._facts | {"id": kept.get("id", self._facts["id"])}
        self._tell: Callable[[str], None] = lambda text: None
        self._is_told = False
        self._metrics = self._open("metrics.jsonl")

    def _make_folder(self) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
            RealDisk(self.folder.parent).sync_folder()
        except FileExistsError:
            raise StorageError(
                f"there is a run named {self.name} already",
                code="W5-403",
                fix=f"go on with it by  --resume {self.name} , or choose another --name",
            ) from None
        except OSError as error:
            raise StorageError(
                f"the run folder {self.folder} cannot be made: {error.strerror}",
                code="W5-404",
                fix="choose another folder with --runs",
            ) from error

    def _open(self, name: str) -> IO[str]:
        # One line at a time reaches the file, so that a killed coordinator leaves whole lines.
        return (self.folder / name).open("a", encoding="utf-8", buffering=1)

    @property
    def facts(self) -> dict[str, Any]:
        """The manifest as it stands."""
        return self._facts

    def learn(self, facts: dict[str, Any]) -> None:
        """Add to the manifest when that is next written: a start that fails leaves it as it was."""
        self._facts |= facts

    def manifest(self, facts: dict[str, Any]) -> None:
        """Add to the manifest; the file is written whole or not at all."""
        self.learn(facts)
        try:
            replace(self.disk, MANIFEST, to_json(self._facts).encode() + b"\n")
        except OSError as error:
            self._trouble(MANIFEST, error)

    def watch(self, trouble: Callable[[str], None]) -> None:
        """Training goes on when the folder cannot be written; `trouble` tells once."""
        self._tell = trouble

    def metrics(self, row: dict[str, Any]) -> None:
        try:
            self._metrics.write(to_json(row) + "\n")
            self._is_told = False
        except OSError as error:
            self._trouble("metrics.jsonl", error)

    def _trouble(self, name: str, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell(f"{name} cannot be written: {error.strerror}; training goes on")

    def save_model(self, data: bytes) -> None:
        """Write the model; a folder that cannot be written is told with its fix."""
        try:
            replace(self.disk, MODEL, data)
        except OSError as error:
            raise StorageError(
                f"the model cannot be saved in {self.folder}: {error.strerror}",
                code="W5-402",
                fix="make room there, or choose another folder with --runs",
            ) from error

    def discard(self) -> None:
        """The run never began: leave no trace of it, unless it had begun before."""
        self.close()
        if not self.is_resumed:
            shutil.rmtree(self.folder)

    def close(self) -> None:
        # What could not be written was told when it happened.
        with contextlib.suppress(OSError):
            self._metrics.close()
        self._lock.release()
