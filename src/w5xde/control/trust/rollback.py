"""Rollback: opens steps again that could not be applied, or that used an update of a cheating node.

Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from w5xde.control import events as ev
from w5xde.control.modes.base import Mode
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import StepPlan
from w5xde.control.steps.tally import Tally
from w5xde.control.trust.verification import Verification
from w5xde.tree import Span


class Rollback:
    """Takes steps back, and opens them again."""

    def __init__(self, mode: Mode, leases: Leases, tally: Tally, verification: Verification) -> None:
        self._mode = mode
        self._leases = leases
        self._tally = tally
        self._verification = verification

    def cancel_leases(self, step: int) -> list[ev.Effect]:
        """End the leases of a step whose answers are no longer needed."""
        cancelled: dict[str, list[int]] = {}
        for lease in self._leases.of_step(step):
            self._leases.end(lease)
            cancelled.setdefault(lease.node, []).append(lease.id)
        return [ev.CancelLeases(node, leases) for node, leases in cancelled.items()]

    def undo(self, event: ev.Undone, *, goes_on: bool) -> list[ev.Effect]:
        """The learner rolled this step back: open it again, and all steps that were decided after it.

        Returns nothing if that was done before. `goes_on`: the run does, and tries them again.
        """
        undone = self._tally.undo(event.step)
        if not undone:
            return []
        self._leases.rewind(event.step.version)
        text = f"step {event.step.version + 1} is undone: {event.reason}"
        text += "; its batches are lent again" if goes_on else ""
        return [
            ev.Note("undone", text, {"step": event.step.plan.index}),
            *(self.reopen(step.plan, step.version) for step in undone),
        ]

    def convict(self, event: ev.Verified, lease: Lease | str, reason: str, version: int) -> list[ev.Effect]:
        """Drop all updates of a node that cheats, or is broken, if they are not applied yet."""
        if isinstance(lease, Lease):
            self._mode.give_back(lease)
        node, applied = event.node, self._verification.applied_of(event.node)
        text = f"{node} is turned out: {reason}; {applied} batches of it are in the model already"
        effects: list[ev.Effect] = [
            ev.Note("cheat", text, {"node": node, "applied": applied, "lease": event.lease}),
            ev.Reject(node, event.lease, reason, fenced=isinstance(lease, str)),
        ]
        put_off = self._mode.put_off
        for open_step in [*self._mode.open_steps, *put_off]:
            if any(share[2] == node for _, shares in open_step.tree for share in shares):
                if open_step in put_off:
                    put_off.remove(open_step)
                effects += [*self.cancel_leases(open_step.plan.index), self.reopen(open_step.plan, version)]
        return effects

    def reopen(self, plan: StepPlan, version: int) -> ev.Effect:
        """Begin a step again. Batches that were set aside stay so."""
        aside = {(each.epoch, each.batch) for each in self._tally.accounts.aside}
        leaves = [Span(i, i + 1) for i in range(plan.count)]
        empty = [leaf for leaf in leaves if aside.issuperset(plan.keys_of(leaf))]
        open_step = OpenStep.restart(plan, empty)
        self._mode.reopen(open_step)
        return ev.Reopen(plan, version, empty)
