"""What a run that is over leaves behind: the newest good weights, and a checkpoint of them.

    the learner is whole    its weights
    the learner broke       the weights of the newest whole checkpoint; without one no model is written

A run that is interrupted twice writes neither: what is on the disk stays as it is. Knows no sockets and no
event loop: the coordinator's body calls this on the thread that writes, when nothing else changes any more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from w5xde.control.coordinator import CoordinatorCore
from w5xde.errors import StorageError
from w5xde.learn.step.checkpoint import model_file, restore_weights
from w5xde.learn.step.learner import Learner
from w5xde.runtime.durable.checkpoints import Store
from w5xde.runtime.durable.journal import Keeper
from w5xde.runtime.durable.run_folder import Recorder
from w5xde.runtime.telemetry.meters import Meters


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The weights in model.safetensors: after how many steps, and their hash. None: the file is not ours."""

    step: int | None = None
    sha256: str | None = None
    # What the user should know if these are not the weights of the last step.
    note: str = ""


def save_model(learner: Learner, keeper: Keeper, recorder: Recorder) -> SavedModel:
    """Write the newest good weights to model.safetensors; raises StorageError if that is not possible."""
    note = ""
    if not learner.is_whole:
        if not _restore_newest(learner, keeper.store):
            return SavedModel(note="no model is saved: the last step broke, and there is no good checkpoint")
        note = f"model.safetensors has the weights of step {learner.version}, from the last good checkpoint"
    data = model_file(learner.flat.module)
    # Ledger first: whoever finds the model can see from the ledger of which step it is.
    keeper.record({"kind": "model", "version": learner.version, "sha256": hashlib.sha256(data).hexdigest()})
    keeper.sync()
    recorder.save_model(data)
    return SavedModel(learner.version, learner.weights_sha256(), note)


def _restore_newest(learner: Learner, store: Store) -> bool:
    """Give the learner the weights of the newest checkpoint that can be used."""
    checkpoint, _ = store.find_whole()
    if checkpoint is None:
        return False
    try:
        restore_weights(learner, checkpoint.files)
    except StorageError:
        return False
    return True


def save_checkpoint(keeper: Keeper, core: CoordinatorCore, version: int, meters: Meters, now: float) -> str:
    """Write a checkpoint of the end; returns why that failed, or nothing.

    Nothing is written if the learner's `version` is not the last one that the core decided.
    """
    cut = core.cut(now)
    if version != cut.version:
        return ""
    error = keeper.save_last(cut, meters.kept())
    if error:
        return f"the last checkpoint could not be written: {error}"
    core.progress.durable_steps = cut.progress.steps
    return ""
