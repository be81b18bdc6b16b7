"""Quorum: whether enough nodes took part in a step for its robust mean to leave out what was asked for.

With fewer nodes, fewer extremes are left out; such steps are counted, and the first is reported. Only
decides: knows no tensors and no clock.
"""

from __future__ import annotations

from w5xde.control.events import Effect, Note, Step
from w5xde.specs.robust_rule import Robust


class Quorum:
    """Counts the nodes of each step; without a rule any number is enough."""

    def __init__(self, rule: Robust | None) -> None:
        self._rule = rule
        self._reported: set[str] = set()

    def is_short(self, step: Step) -> bool:
        return self._rule is not None and _nodes(step) < self._rule.needs

    def remark(self, step: Step) -> list[Effect]:
        """Return a note for the first step that has too few nodes, and for the first with too few batches."""
        if self._rule is None or not self.is_short(step):
            return []
        nodes, needs, batches = _nodes(step), self._rule.needs, step.plan.count
        if batches < needs:
            kind, what = "batches", f"it has {batches} batch{'es' * (batches > 1)}"
        else:
            kind, what = "nodes", f"{nodes} took part"
        if kind in self._reported:
            return []
        self._reported.add(kind)
        text = (
            f"step {step.plan.index + 1} is less robust than asked for: that takes {needs} nodes, and {what};"
            f" {self._rule.left_out(nodes)} were left out at each end. Later ones are counted, not told"
        )
        return [Note("degraded", text, {"step": step.plan.index, "nodes": nodes, "needs": needs})]


def _nodes(step: Step) -> int:
    return len({node for _, _, node, _ in step.shares})
