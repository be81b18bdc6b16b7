"""`w5xde audit`: counts a run again from its ledger alone, and checks every checkpoint against the ledger.

Only reads, so that anybody can audit a run, also while it is training.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from w5xde.control.audit.auditor import Auditor
from w5xde.control.audit.findings import Findings
from w5xde.errors import StorageError
from w5xde.runs import BEST, MODEL, read_manifest
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import Disk, RealDisk
from w5xde.runtime.durable.ledger_segments import LedgerReader
from w5xde.runtime.durable.resume import extent_of, facts_of
from w5xde.runtime.durable.sealed_json import NOTHING, Damaged


@dataclass(slots=True)
class AuditReport:
    """The findings of an audit, for views and for --json."""

    run: str
    findings: Findings
    # Version -> the damage of that checkpoint, or an empty string.
    checkpoints: dict[int, str]
    # After how many steps the weights in model.safetensors, and in best.safetensors, are; None if there is no
    # file, or nobody said.
    model_step: int | None = None
    best_step: int | None = None

    @property
    def is_clean(self) -> bool:
        return not self.findings.violations

    def summary(self) -> dict[str, Any]:
        facts = asdict(self.findings)
        recorded = facts.pop("checkpoints")
        del facts["models"], facts["best"]
        return {
            "run": self.run,
            "clean": self.is_clean,
            **facts,
            "aside": [{"epoch": epoch + 1, "batch": batch} for epoch, batch in self.findings.aside],
            "model_step": self.model_step,
            "best_step": self.best_step,
            "checkpoints_written": len(recorded),
            "checkpoints": {str(version): wrong or "whole" for version, wrong in self.checkpoints.items()},
        }


def audit_run(folder: Path) -> AuditReport:
    """Audit a run folder, trusting nothing that it says."""
    manifest = read_manifest(folder)
    extent = extent_of(manifest, folder)
    report = audit_disk(RealDisk(folder), folder.name, extent.ledger.sha256)
    result, found = manifest.get("result"), report.findings
    if result is not None and found.ended and result["batches"] != found.batches:
        found.violations.append(f"{result['batches']} batches were reported, the ledger has {found.batches}")
    if extent.life > found.life:
        found.violations.append(f"the run was in life {extent.life}, the ledger ends in life {found.life}")
    return report


def audit_disk(disk: Disk, run: str, head: str = NOTHING) -> AuditReport:
    """Audit the files on any disk; the ledger must have a line with the hash `head`."""
    store = CheckpointStore(disk)
    checkpoints, expected, hashes = {}, {head}, {}
    for version in store.versions():
        try:
            checkpoint = store.read(version)
            expected.add(facts_of(checkpoint).ledger.sha256)
        except (Damaged, StorageError) as damage:
            if version not in store.versions():
                continue  # a running coordinator removed it meanwhile
            checkpoints[version] = str(damage)
        else:
            checkpoints[version] = ""
            hashes[version] = checkpoint.sha256
    reader = LedgerReader(disk, expected)
    auditor = Auditor()
    for record in reader.records():
        auditor.read(record)
    found = auditor.close()
    found.violations += reader.damage
    found.remarks += reader.remarks
    for version, wrong in checkpoints.items():
        recorded = found.checkpoints.get(version)
        if wrong:
            found.violations.append(f"checkpoint step-{version:09} is damaged: {wrong}")
        elif version > found.steps:
            found.violations.append(f"checkpoint step-{version:09} is of more steps than the ledger has")
        elif recorded is not None and recorded != hashes[version]:
            found.violations.append(f"checkpoint step-{version:09} is not the one that the ledger recorded")
    # A newer checkpoint replaces the newest one of the ledger; an older one does not.
    newest = max(found.checkpoints, default=0)
    if max(store.versions(), default=0) < newest:
        found.violations.append(
            f"no whole checkpoint is left of the {newest} steps that the ledger calls saved"
        )
    model_step = _step_of(MODEL, found.models, disk, found)
    return AuditReport(run, found, checkpoints, model_step, _step_of(BEST, found.best, disk, found))


def _step_of(name: str, saved: dict[str, int], disk: Disk, found: Findings) -> int | None:
    """After how many steps the weights in a file are; a file that the run never saved is a violation."""
    # Runs of before this was recorded say nothing of their model.
    if not saved or name not in disk.names():
        return None
    step = saved.get(hashlib.sha256(disk.read(name)).hexdigest())
    if step is None:
        found.violations.append(f"{name} is none of those that the run saved")
    return step
