"""`w5xde export`: writes weights of a run to a file that other programs read: the newest, or the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from w5xde.errors import StorageError
from w5xde.learn.job.job import describe
from w5xde.learn.step.checkpoint import MODEL
from w5xde.runs import BEST
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.resume import facts_of
from w5xde.runtime.evaluation.best import read_best


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
    _write(model, kind, target, folder.name, "this checkpoint was not written by w5xde; remove it")
    return {
        "run": folder.name,
        "steps": facts.cut.progress.steps,
        "file": str(target),
        "bytes": target.stat().st_size,
        "weights_sha256": facts.weights_sha256,
        "damaged": list(damaged.values()),
    }


def export_best(folder: Path, kind: str, target: Path) -> dict[str, Any]:
    """Write the weights of the best evaluation; return the facts of the written file."""
    path = folder / BEST
    if not path.exists():
        raise StorageError(
            f"run {folder.name} has no {BEST}",
            code="W5-263",
            fix='keep the best weights with  callbacks=[w5xde.SaveBest("loss")] , or leave out --best',
        )
    try:
        best, sha256 = read_best(path)
        model = path.read_bytes()
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read: {error}", code="W5-407", fix="leave out --best for the newest weights"
        ) from error
    _write(model, kind, target, folder.name, "leave out --best for the newest weights")
    return {
        "run": folder.name,
        "steps": best.step,
        "metric": best.metric,
        "value": best.value,
        "file": str(target),
        "bytes": target.stat().st_size,
        "weights_sha256": sha256,
        "damaged": [],
    }


def _write(model: bytes, kind: str, target: Path, run: str, fix: str) -> None:
    """Write a safetensors file as it is, or what is in it as a file of torch's."""
    try:
        weights = load(model) if kind == "pt" else {}
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"the weights of run {run} cannot be read: {describe(error)}", code="W5-407", fix=fix
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
