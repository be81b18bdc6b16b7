"""The run folder: its lock, manifest, metrics and model. Other programs can read all of its files.

runs/NAME/manifest.json       settings, versions, model, result
runs/NAME/metrics.jsonl       one object a second: step, loss, rates, nodes (at first four)
runs/NAME/trace.jsonl         times of some leases, at most 8 MB; trace.jsonl.1 has the lines before
runs/NAME/ledger-*.jsonl      every event, chained by hashes; full ones end in .zst (see ledger_segments.py)
runs/NAME/checkpoints/        states from which the run can be resumed (see checkpoints.py)
runs/NAME/steps-*.log         with --durability step: the steps since the checkpoint (see step_log.py)
runs/NAME/tickets.json        tickets and nodes; of secrets only their hashes (see admission/register.py)
runs/NAME/lock                the process that owns the run
runs/NAME/model.safetensors   the trained weights
runs/NAME/best.safetensors    the weights of the best evaluation, if a callback keeps them
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

import w5xde
from w5xde.config import Settings
from w5xde.errors import StorageError
from w5xde.runs import MANIFEST, METRICS, MODEL, TRACE, free_name, read_manifest
from w5xde.runtime.durable.again import RunClaim, make_folder
from w5xde.runtime.durable.disk import HashedPieces, Piece, RealDisk, replace
from w5xde.runtime.durable.line_file import LineFile
from w5xde.runtime.durable.lock import RunLock
from w5xde.runtime.durable.resume import NO_LEDGER, extent_of
from w5xde.sanitize import harmless, to_json

# Hours of a slow run, and minutes of a quick one.
TRACE_BYTES = 8_000_000


class RunFolder:
    """Owns one run's folder: a new one, or with `settings.resume` an earlier run's."""

    def __init__(self, settings: Settings, job_name: str, claim: RunClaim | None = None) -> None:
        """`claim`: the folder is locked already, and made if the run is new."""
        self.is_resumed = settings.goes_on
        stem = f"{harmless(job_name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.name = settings.name or free_name(Path(settings.runs), stem)
        self.folder = Path(settings.runs) / self.name
        lock = claim.take() if claim is not None else None
        if lock is None and not self.is_resumed:
            self._make_folder()
        self._lock = lock or RunLock(self.folder)
        self.disk = RealDisk(self.folder)
        # The manifest as it will be written next: a start that fails leaves the file as it was.
        self.facts: dict[str, Any] = {
            "run": self.name,
            # Unique across machines, unlike the name: the state folder keeps keys by it.
            "id": secrets.token_hex(8),
            "w5xde": w5xde.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
            # With the number of batches that the default was when the run began: it decides the weights.
            "settings": msgspec.to_builtins(settings) | {"batches_per_step": settings.step_batches},
        }
        # How far earlier lives wrote the ledger.
        self.ledger_extent = NO_LEDGER
        if self.is_resumed:
            before = read_manifest(self.folder)
            self.ledger_extent = extent_of(before, self.folder)
            # How an earlier life ended says nothing of this one.
            kept = {key: before[key] for key in before.keys() - {"result", "reason"}}
            self.facts = kept | self.facts | {"id": kept.get("id", self.facts["id"])}
        self._report: Callable[[str], None] = lambda text: None
        self._is_reported = False
        self._metrics = LineFile(self.folder / METRICS)
        self._trace = LineFile(self.folder / TRACE, TRACE_BYTES)

    def _make_folder(self) -> None:
        if self.folder.exists():
            raise StorageError(
                f"there is a run named {self.name} already",
                code="W5-403",
                fix=f"go on with it by  --resume {self.name} , or choose another --name",
            )
        make_folder(self.folder)

    def require_same_data(self, samples: int | None, order: str) -> None:
        """Refuse to resume with other samples or another order: some would count twice, and some never."""
        before = self.facts.get("samples", samples)
        if before != samples:
            raise StorageError(
                f"the data set has {samples} samples, run {self.name} began with {before}",
                code="W5-405",
                fix="resume with the data the run was started with (mended, not shortened), or start a new"
                " run",
            )
        if self.facts.get("order", order) != order:
            raise StorageError(
                f"the sampler draws another order than the one that run {self.name} began with",
                code="W5-405",
                fix="resume with the sampler the run was started with, or start a new run",
            )

    def manifest(self, facts: dict[str, Any]) -> bool:
        """Add facts and write the manifest atomically; False if that was not possible."""
        self.facts |= facts
        try:
            replace(self.disk, MANIFEST, to_json(self.facts).encode() + b"\n")
        except OSError as error:
            self._trouble(MANIFEST, error)
            return False
        return True

    def watch(self, trouble: Callable[[str], None]) -> None:
        """Pass one sentence to `trouble` when the folder cannot be written; training goes on."""
        self._report = trouble

    def metrics(self, row: dict[str, Any]) -> None:
        self._append(self._metrics, METRICS, row)

    def trace(self, row: dict[str, Any]) -> None:
        self._append(self._trace, TRACE, row)

    def _append(self, file: LineFile, name: str, row: dict[str, Any]) -> None:
        try:
            file.write(to_json(row))
            self._is_reported = False
        except OSError as error:
            self._trouble(name, error)

    def _trouble(self, name: str, error: OSError) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._report(f"{name} cannot be written: {error.strerror}; training goes on")

    def stage(self, name: str, pieces: Iterable[Piece]) -> str:
        """Write a file under a temporary name; returns its sha256."""
        hashed = HashedPieces(pieces)
        self.disk.write(f"{name}.tmp", hashed)
        return hashed.sha256

    def publish(self, name: str) -> None:
        """Give a staged file its name, in place of an earlier one."""
        self.disk.rename(f"{name}.tmp", name)
        self.disk.sync_folder()

    def save_model(self, pieces: Iterable[Piece], record: Callable[[str], None]) -> None:
        """Write the trained weights atomically; `record` gets their hash before the file has its name."""
        try:
            record(self.stage(MODEL, pieces))
            self.publish(MODEL)
        except OSError as error:
            raise StorageError(
                f"the model cannot be saved in {self.folder}: {error.strerror}",
                code="W5-402",
                fix="make room there, or choose another folder with --runs",
            ) from error

    def discard(self) -> None:
        """Remove a new run that never began; only close a resumed one."""
        self.close()
        if not self.is_resumed:
            shutil.rmtree(self.folder)

    def close(self) -> None:
        # A failed write was reported when it happened.
        with contextlib.suppress(OSError):
            self._metrics.close()
        with contextlib.suppress(OSError):
            self._trace.close()
        self._lock.release()
