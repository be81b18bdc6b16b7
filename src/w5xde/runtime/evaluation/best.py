"""best.safetensors: the weights of the best evaluation so far, written beside the training.

The file replaces the one before atomically, and only after the ledger says of which step it is. Its metadata
say so too, so that a resumed run remembers its best. Does not decide which evaluation is better.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from w5xde.callbacks.status import Best
from w5xde.callbacks.weights import Weights
from w5xde.learn.model.digest import tensors_sha256
from w5xde.learn.model.tensor_file import safetensors_pieces
from w5xde.runs import BEST
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.system.actor import Actor


class _Kept(NamedTuple):
    """Weights to be written, and what is said of them."""

    weights: Weights
    best: Best


class BestWeights:
    """Writes best.safetensors of one run, on the writing thread."""

    def __init__(
        self, folder: RunFolder, journal: Journal, writer: Actor, note: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._journal = journal
        self._writer = writer
        self._note = note
        self._loop = asyncio.get_running_loop()
        # What is being written, and what follows: nothing between the two is worth writing.
        self._writing: _Kept | None = None
        self._next: _Kept | None = None
        self._written = self._known()

    @property
    def best(self) -> Best | None:
        """That of the newest file which is written, or will be."""
        newest = self._next or self._writing
        return newest.best if newest is not None else self._written

    def _known(self) -> Best | None:
        path = self._folder.folder / BEST
        if not path.exists():
            return None
        try:
            return read_best(path)[0]
        except (SafetensorError, OSError, ValueError) as error:
            self._note(f"{BEST} cannot be read, and the best so far is forgotten: {error}")
            return None

    def save(self, weights: Weights, metric: str, value: float) -> None:
        """Write these weights, which have this value of the metric."""
        self._next = _Kept(weights, Best(weights.step, weights.epoch, metric, value))
        if self._writing is None:
            self._begin()

    def _begin(self) -> None:
        """Write the file, then its record, and then give the file its name."""
        kept, self._writing, self._next = self._next, self._next, None
        if kept is not None:
            self._writer.call(lambda: self._stage(kept), lambda sha256: self._staged(kept, sha256))

    def _staged(self, kept: _Kept, sha256: str | OSError) -> None:
        if isinstance(sha256, OSError):
            self._failed(_reason(sha256))
            return
        best = kept.best
        record = {"kind": "best", "version": best.step, "sha256": sha256, "metric": best.metric}

        def recorded(trouble: str) -> None:
            if trouble:
                self._failed(trouble)
            else:
                self._writer.call(self._publish, published)

        def published(error: OSError | None) -> None:
            if error is not None:
                self._failed(_reason(error))
            else:
                self._written = best
                self._begin()

        self._journal.record_durably(record | {"value": best.value}, self._loop.time(), recorded)

    def _failed(self, reason: str) -> None:
        self._note(f"{BEST} cannot be written: {reason}; training goes on")
        self._begin()

    def _stage(self, kept: _Kept) -> str | OSError:
        sha256 = tensors_sha256(kept.weights.values())
        facts = msgspec.to_builtins(kept.best) | {"weights_sha256": sha256}
        # The format has only text there.
        metadata = {key: str(value) for key, value in facts.items()}
        try:
            return self._folder.stage(BEST, safetensors_pieces(kept.weights, metadata))
        except OSError as error:
            return error

    def _publish(self) -> OSError | None:
        try:
            self._folder.publish(BEST)
        except OSError as error:
            return error
        return None

    async def finish(self) -> None:
        """Wait until everything that was begun is written."""
        while self._writing is not None:
            await self._writer.drain()

    def facts(self) -> dict[str, Any] | None:
        """What the summary says of the file; None if there is none."""
        return None if self.best is None else {"file": BEST, **msgspec.to_builtins(self.best)}


def read_best(path: Path) -> tuple[Best, str]:
    """What a best.safetensors says of its weights, and their sha256; ValueError if it says nothing."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    try:
        # Not strict: numbers are text there.
        return msgspec.convert(metadata, Best, strict=False), str(metadata["weights_sha256"])
    except (msgspec.ValidationError, KeyError) as error:
        raise ValueError(f"its metadata are not those of w5xde ({error})") from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
