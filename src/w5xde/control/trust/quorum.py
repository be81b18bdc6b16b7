"""The quorum: whether enough nodes took part in a step for its robust mean to be what was asked for.

With fewer, fewer are left out; that is counted, and told once. Only decides: knows no tensors and no clock.
"""

from __future__ import annotations

from w5xde.control.events import Effect, Note, Step
from w5xde.robust_rule import Robust


class Quorum:
    """Looks at who gave what of each step; without a rule every number of nodes is enough."""

    def __init__(self, rule: Robust | None) -> None:
        self._rule = rule
        self._told: set[str] = set()

    def is_short(self, step: Step) -> bool:
        return self._rule is not None and _nodes(step) < self._rule.needs

    def remark(self, step: Step) -> list[Effect]:
        """What is to be said of a step that is too short, the first time that there is one, of each kind."""
        if self._rule is None or not self.is_short(step):
            return []
        nodes, needs = _nodes(step), self._rule.needs
        batches = step.plan.count
        what = f"it has {batches} batch{'es' * (batches > 1)}" if batches < needs else f"{nodes} took part"
        kind = "batches" if batches < needs else "nodes"
        if kind in self._told:
            return []
        self._told.add(kind)
        text = (
            f"step {step.plan.index + 1} is less robust than asked for: that takes {needs} nodes, and {what};"
            f" {self._rule.left_out(nodes)} were left out at each end. Later ones are counted, not told"
        )
        return [Note("degraded", text, {"step": step.plan.index, "nodes": nodes, "needs": needs})]


def _nodes(step: Step) -> int:
    return len({node for _, _, node, _ in step.shares})
