"""`w5xde export`: writes the newest weights of a run to a file that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from w5xde.errors import StorageError
from w5xde.learn.job.job import describe
from w5xde.learn.step.checkpoint import MODEL
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.resume import facts_of


def export_run(folder: Path, kind: str, target: Path) -> dict[str, Any]:
    """Write the weights of the newest whole checkpoint; return the facts of the written file."""
    checkpoint, damaged = CheckpointStore(RealDisk(folder)).find_whole()
    if checkpoint is None:
        found = "; ".join(damaged.values())
        raise StorageError(
            f"run {folder.name} has no whole checkpoint" + (f": {found}" if found else " yet"),
            code="W5-407",
            fix="train for a while, or restore a checkpoint from a copy",
        )
    facts, model = facts_of(checkpoint), checkpoint.files.get(MODEL, b"")
    try:
        weights = load(model) if kind == "pt" else {}
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"the weights of run {folder.name} cannot be read: {describe(error)}",
            code="W5-407",
            fix="this checkpoint was not written by w5xde; remove it, and the one before it is used",
        ) from error
    try:
        if kind == "pt":
            # A state dict, for torch.load(…, weights_only=True) and load_state_dict.
            torch.save(weights, target)
        else:
            target.write_bytes(model)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"{target} cannot be written: {error}", code="W5-402", fix="choose another --out"
        ) from error
    return {
        "run": folder.name,
        "steps": facts.cut.progress.steps,
        "file": str(target),
        "bytes": target.stat().st_size,
        "weights_sha256": facts.weights_sha256,
        "damaged": list(damaged.values()),
    }
