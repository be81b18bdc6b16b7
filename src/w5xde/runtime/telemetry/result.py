"""The result of a run, as the Python interface returns it. Knows nothing of how the run was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

# Measures beyond these are counted and not shown.
METRICS_SHOWN = 4


@dataclass(slots=True, repr=False)
class Result:
    """The result of a run: the trained model, and everything that --json prints."""

    model: Module
    summary: dict[str, Any]
    folder: Path
    reason: str
    # The ticket by which nodes joined; the run has it again if it is resumed. A secret, so it is not shown.
    ticket: str = field(default="", repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.summary["metrics"])

    @property
    def is_over(self) -> bool:
        """Whether the run is over; not if an interrupt stopped it, so that it can be resumed."""
        return bool(self.summary["over"])

    def __repr__(self) -> str:
        """A few lines that fit on any screen; `summary` has everything."""
        s, shown = self.summary, self.metrics
        measured = [f"{key} {value:.4g}" for key, value in list(shown.items())[:METRICS_SHOWN]]
        if len(shown) > METRICS_SHOWN:
            measured.append(f"and {len(shown) - METRICS_SHOWN} more metrics")
        parameters = sum(each.numel() for each in self.model.parameters())
        counts = ", ".join(_counted(s[f"{word}s"], word) for word in ("epoch", "step", "sample"))
        lines = [
            f"<w5xde.Result of run {s['run']}",
            f"  {counts} in {s['seconds']:.1f} s ({self.reason})",
            f"  loss {s['loss_first']:.4g} → {s['loss_last']:.4g}" if s["loss_last"] is not None else "",
            f"  evaluation: {', '.join(measured)}" if measured else "",
            f"  .model    {type(self.model).__name__} with {parameters:,} parameters",
            f"  .folder   {self.folder}",
            "  .metrics, .summary (all figures), .reason, .ticket>",
        ]
        return "\n".join(line for line in lines if line)


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
