"""The verdict on a run under chaos: it must have the weights of a single process, and a clean audit.

Knows nothing of the faults: it reads only the run folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.config import Settings
from w5xde.demo import accuracy, alone
from w5xde.errors import TrainingError
from w5xde.learn.model.device import threads
from w5xde.learn.model.digest import weights_sha256
from w5xde.runs import read_manifest
from w5xde.runtime.durable.audit import AuditReport, audit_run


@dataclass(frozen=True, slots=True)
class Verdict:
    """Both hashes and the audit; it holds if the hashes are equal and the audit is clean."""

    weights_sha256: str
    alone_sha256: str
    accuracy: float
    report: AuditReport

    @property
    def is_same(self) -> bool:
        return self.weights_sha256 == self.alone_sha256

    def lines(self) -> list[str]:
        """One sentence for the weights and one for the audit, with markup."""
        found = self.report.findings
        same = "[bold green]same weights[/]" if self.is_same else "[bold red]OTHER WEIGHTS[/]"
        clean = "[bold green]clean[/]" if self.report.is_clean else "[bold red]the promise did not hold[/]"
        weights = (
            f"{same} from the pool and from one process: sha256 {self.weights_sha256[:16]}… and "
            f"{self.alone_sha256[:16]}…, test accuracy {self.accuracy:.1%}"
        )
        audit = (
            f"audit {clean}: {len(found.violations)} violations, {found.batches:,} batches in "
            f"{found.steps:,} steps; {found.lives} lives of the coordinator, {found.steps_redone} redone"
        )
        return [weights, audit]

    def require(self) -> None:
        """TrainingError unless the verdict holds."""
        if not self.report.is_clean:
            violations = self.report.findings.violations
            raise TrainingError(
                f"the audit of run {self.report.run} found {len(violations)} violations",
                code="W5-313",
                why=violations[0],
                fix=f"w5xde audit {self.report.run}  lists them; please report this with the run's folder",
            )
        if not self.is_same:
            raise TrainingError(
                "the weights of one process differ from those of the pool",
                code="W5-312",
                why=f"sha256 {self.alone_sha256[:16]}… alone, {self.weights_sha256[:16]}… together",
                fix="please report this with the run's folder",
            )

    def summary(self) -> dict[str, Any]:
        return {
            "weights_sha256": self.weights_sha256,
            "alone_sha256": self.alone_sha256,
            "accuracy": self.accuracy,
            "audit": self.report.summary(),
        }


def judge(run: Path, settings: Settings) -> Verdict:
    """Train in one process for as many steps as the run has, and audit the run."""
    report = audit_run(run)
    result = read_manifest(run)["result"]
    with threads(settings.threads):
        lonely = alone(settings)
        measured = accuracy(lonely.eval())["accuracy"]
    return Verdict(result["weights_sha256"], weights_sha256(lonely), measured, report)
