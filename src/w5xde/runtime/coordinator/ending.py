"""How a run ends: which weights are kept, what is saved, and what the user is told.

    in order              the learner's weights, as model.safetensors and as a last checkpoint
    the learner broke     the weights of the newest whole checkpoint; without one no model is written
    interrupted twice     nothing more is saved: what is on the disk stays as it is

The thread that writes checkpoints writes everything, so that no two writes happen at the same time.
Knows no sockets, and does not decide when a run is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.steps.cut import Cut
from w5xde.errors import StorageError
from w5xde.learn.step.checkpoint import model_pieces, restore_weights
from w5xde.learn.step.learner import Learner
from w5xde.runs import MODEL
from w5xde.runtime.coordinator.peers import PARTING_SECONDS
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.resume import facts_of
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.system.actor import Actor

# A second Ctrl-C stops a run within three seconds, of which the process needs one to end: how long an ending
# that is cut short may take, and how much of that nodes get to read their goodbye.
STOP_NOW_SECONDS, STOP_NOW_PARTING_SECONDS = 2.0, 0.5
# How much of the 20 s after SIGTERM nodes get to read it.
HURRIED_PARTING_SECONDS = 2.0


class RunEnd:
    """Whether a run has ended, and how."""

    def __init__(self) -> None:
        self._finish: ev.Finish | None = None
        self._hurries_because = ""
        self.hurried = asyncio.Event()

    def come(self, finish: ev.Finish) -> None:
        self._finish = finish

    def spoil(self, error: str) -> None:
        """A step that was decided before the end failed after it: so the run did not end in order."""
        if self._finish is not None and not self._finish.error:
            self._finish = ev.Finish("", error)

    def hurry(self, reason: str) -> None:
        """The process must end within a few seconds."""
        self._hurries_because = reason
        self.hurried.set()

    @property
    def hurries(self) -> bool:
        return self.hurried.is_set()

    @property
    def parting_seconds(self) -> float:
        """How long nodes get to read the goodbye."""
        return HURRIED_PARTING_SECONDS if self.hurries else PARTING_SECONDS

    def cut_short(self) -> None:
        """There was no time for all that belongs to the end: the next life of the run makes up for it."""
        if self._finish is not None and not self._finish.error:
            self._finish = ev.Finish(self._hurries_because, interrupted=True)

    @property
    def has_come(self) -> bool:
        return self._finish is not None

    @property
    def reason(self) -> str:
        """Why the run ended; empty before."""
        return (self._finish.error or self._finish.reason) if self._finish is not None else ""

    @property
    def is_complete(self) -> bool:
        """Whether the run is over: it has ended, neither with an error nor by an interrupt."""
        return self._finish is not None and not self._finish.error and not self._finish.interrupted

    @property
    def error(self) -> str:
        return self._finish.error if self._finish is not None else "interrupted"


class SavedModel(NamedTuple):
    """The weights that an ending saved: after how many steps, and their hash; None if it saved none."""

    weights_step: int | None
    weights_sha256: str | None
    # Whether a last checkpoint has the same weights.
    is_durable: bool = False
    # How many epochs were complete after those steps.
    weights_epoch: int = 0

    def facts(self) -> dict[str, Any]:
        return {"weights_step": self.weights_step, "weights_sha256": self.weights_sha256}


@dataclass(slots=True)
class Ending:
    """Ends one run: `save`, then `close`; or `abandon`, at any moment."""

    learner: Learner
    journal: Journal
    folder: RunFolder
    writer: Actor
    settings: Settings
    # Tells the user a sentence.
    note: Callable[[str], None]
    _is_saved: bool = field(default=False, init=False)
    _is_closing: bool = field(default=False, init=False)

    async def save(self, cut: Cut, facts: dict[str, Any]) -> SavedModel:
        """Save the newest good weights; raises StorageError if the model cannot be written.

        `cut`: all that the core has decided, and `facts` to keep with it, for a last checkpoint.
        """
        await self.writer.drain()
        epoch = cut.progress.epochs
        if not self.learner.is_whole:
            restored = await self.writer.result_of(self._restore_newest)
            if restored is None:
                self.note("no model is saved: the last step broke, and there is no good checkpoint")
                return SavedModel(None, None)
            epoch, step = restored, self.learner.version
            self.note(f"{MODEL} has the weights of step {step}, from the last good checkpoint")
        saved = (await self.writer.result_of(self._save_model))._replace(weights_epoch=epoch)
        # The core may have decided steps that were never applied: then no checkpoint of it fits the weights.
        if self.settings.checkpoint_every != "off" and saved.weights_step == cut.version:
            failure = await self.writer.result_of(lambda: self.journal.save_last(cut, facts))
            if failure:
                self.note(f"the last checkpoint could not be written: {failure}")
            else:
                saved = saved._replace(is_durable=True)
        return saved

    def _restore_newest(self) -> int | None:
        """Give the learner the weights of the newest checkpoint.

        Returns how many epochs were complete then; None if there is no checkpoint that can be used.
        """
        checkpoint, _ = self.journal.store.find_whole()
        if checkpoint is None:
            return None
        try:
            epochs = facts_of(checkpoint).cut.progress.epochs
            restore_weights(self.learner, checkpoint.files)
        except (StorageError, OSError):
            return None
        return epochs

    def _save_model(self) -> SavedModel:
        step = self.learner.version

        def record(sha256: str) -> None:
            # Ledger first: it says of every model that is found in the folder after how many steps it is.
            self.journal.record({"kind": "model", "version": step, "sha256": sha256})
            self.journal.sync()

        self.folder.save_model(model_pieces(self.learner.flat.module), record)
        self._is_saved = True
        return SavedModel(step, self.learner.weights_sha256())

    async def close(self, end: RunEnd, summary: dict[str, Any]) -> None:
        """Write the ledger's last record and the result, and give the folder back."""
        await self.writer.result_of(lambda: self._end_ledger(end))
        facts = {"reason": end.reason, "result": summary, "ledger": self.journal.head}
        await self.writer.result_of(lambda: self.folder.manifest(facts))
        await self.writer.result_of(self.folder.close)

    async def abandon(self, learner: Actor, end: RunEnd) -> None:
        """Save nothing more; end the ledger once the `learner` and the writer have done what they began."""
        try:
            await learner.drain()
            await self.writer.drain()
        finally:
            # Also if that takes too long. By now a model that was being written may be whole.
            if not self._is_saved:
                self.note(f"no model is saved; {self.journal.store.last_good}")
        if not self._is_closing:
            await self.writer.result_of(lambda: self._end_ledger(end))

    def _end_ledger(self, end: RunEnd) -> None:
        self._is_closing = True
        self.journal.stop({"kind": "stop", "reason": end.reason, "error": end.error})
