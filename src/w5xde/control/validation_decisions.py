"""Decisions about a validation: which answers count, when it is complete, and when it is given up.

Knows no metrics: the runtime keeps them, and adds them up when every batch is measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from w5xde.control import events as ev
from w5xde.control.pool.members import Member
from w5xde.control.run_state import RunState
from w5xde.control.steps.leases import Lease

# A validation waits this long for a node before the coordinator measures itself: a run that is resumed, and
# nodes that lost their connection, need a moment.
ALONE_SECONDS = 10.0


class ValidationDecisions:
    """From the answer to a validation lease to the end of the validation."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        # Since when a validation has waited, and no node was there.
        self._alone_since: float | None = None

    def measured(self, event: ev.Measured, now: float) -> list[ev.Effect]:
        """A node has measured the batches of a lease."""
        verification = self._state.verification
        held = self._state.leases.get(event.lease) if verification.holds_back(event.lease) else None
        if held is not None and held.node == event.node:
            return [ev.Verify(held)] if verification.begin(event.lease, 0.0) else []
        return self.accept(event.node, event.lease, now)

    def accept(self, node: str, number: int, now: float) -> list[ev.Effect]:
        """Decide on what was measured for a lease, which was verified or need not be."""
        state = self._state
        lease, member = state.settle(node, number, now)
        if isinstance(lease, str):
            return [ev.Reject(node, number, lease, fenced=True), *self._lend_to(member, now)]
        reason = state.validation.admit(lease)
        if reason:
            state.validation.give_back(lease)
            return [ev.Reject(node, number, reason), *self._lend_to(member, now)]
        effects: list[ev.Effect] = [ev.KeepMeasures(lease)]
        complete = state.validation.take(lease)
        if complete is not None:
            effects += state.rollback.cancel_leases(complete.plan.index)
            effects.append(ev.Conclude(lease.version))
        return effects + self._lend_to(member, now)

    def failed(self, lease: Lease, reason: str, now: float) -> list[ev.Effect]:
        """A node could not measure a batch: another one tries, or the validation is given up."""
        state = self._state
        open_step = state.validation.give_back(lease, failed=True)
        text = f"{lease.node} could not measure {lease.where}: {reason}"
        effects: list[ev.Effect] = [
            ev.Reject(lease.node, lease.id, reason),
            ev.Note("failed", text, {"node": lease.node}),
        ]
        others = state.leases.of_step(lease.step.index)
        if open_step is not None and open_step.must_set_aside(lease.span, state.members, others):
            return effects + self._give_up(f"{lease.where} fails wherever it is tried: {reason}")
        return effects + state.lend(state.members, now)

    def unreadable(self, lease: Lease, reasons: Mapping[int, str]) -> list[ev.Effect]:
        """The coordinator cannot read some batches: no node could measure them."""
        if self._state.validation.give_back(lease) is None:
            return []
        number, reason = min(reasons.items())
        return self._give_up(f"batch {number} of the validation set cannot be read: {reason}")

    def distrust(self, node: str) -> list[ev.Effect]:
        """Measure all batches again if this node, which cheats or is broken, has measured some of them."""
        state = self._state
        for open_step in state.validation.open_steps:
            if any(share[2] == node for _, shares in open_step.tree for share in shares):
                state.validation.restart()
                return state.rollback.cancel_leases(open_step.plan.index)
        return []

    def measure_here_if_alone(self, now: float) -> list[ev.Effect]:
        """Without nodes the coordinator measures: at once if the run is to end, else after a while."""
        state = self._state
        if state.members or not state.validation.is_waiting or state.hurries:
            self._alone_since = None
            return []
        since = self._alone_since = now if self._alone_since is None else self._alone_since
        is_ending = state.is_stopping or state.validation.is_last
        if not state.tally.is_applied or (now - since < ALONE_SECONDS and not is_ending):
            return []
        state.validation.take_over(state.version)
        return [ev.Evaluate(state.version)]

    def _give_up(self, reason: str) -> list[ev.Effect]:
        state = self._state
        index = state.validation.give_up()
        return [*state.rollback.cancel_leases(index), ev.Conclude(state.version, reason)]

    def _lend_to(self, member: Member | None, now: float) -> list[ev.Effect]:
        return self._state.lend([member], now) if member is not None else []
