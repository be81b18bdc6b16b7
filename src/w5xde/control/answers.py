"""Answers: what a node returned for a lease is verified, accepted, rejected, or counted as a failure.

Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from w5xde.control import events as ev
from w5xde.control.membership import Membership
from w5xde.control.pool.members import Member
from w5xde.control.run_state import RunState
from w5xde.control.step_decisions import StepDecisions
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import StepPlan
from w5xde.control.validation_decisions import ValidationDecisions
from w5xde.tree import Span


class Answers:
    """Ends leases. An answer that counts is folded into its step."""

    def __init__(
        self,
        state: RunState,
        membership: Membership,
        steps: StepDecisions,
        validation: ValidationDecisions,
    ) -> None:
        self._state = state
        self._membership = membership
        self._steps = steps
        self._validation = validation

    def answered(self, event: ev.Answered, now: float) -> list[ev.Effect]:
        state = self._state
        effects: list[ev.Effect] = []
        norms = event.norms or [0.0] * len(event.leases)
        for number, norm in zip(event.leases, norms, strict=True):
            if state.is_finished:
                return effects
            effects += self._take(event.node, number, norm, now)
        member = state.members.get(event.node)
        if member is not None:
            state.members.measured(member, event.batch_seconds, event.compute_seconds, event.core_share)
            effects += state.lend([member], now)
        return effects

    def _take(self, node: str, number: int, norm: float, now: float) -> list[ev.Effect]:
        """Decide on the answer to one lease, or first have it verified."""
        verification = self._state.verification
        held = self._state.leases.get(number) if verification.holds_back(number) else None
        if held is not None and held.node == node:
            # The lease stays outstanding: meanwhile its step may be completed, or its node leave.
            return [ev.Verify(held)] if verification.begin(number, norm) else []
        return self._accept(node, number, norm, now, verified=False)

    def _accept(self, node: str, number: int, norm: float, now: float, *, verified: bool) -> list[ev.Effect]:
        state = self._state
        lease, member = state.settle(node, number, now)
        if isinstance(lease, str):
            return [ev.Reject(node, number, lease, fenced=True)]
        reason = state.mode.admit(lease)
        if reason:
            state.failures.succeeded(member)
            state.mode.give_back(lease)
            return [ev.Reject(node, number, reason)]
        doubt = state.norm_check.check(lease, norm, is_verified=verified)
        if doubt:
            return self._fail(lease, member, doubt, norm, now)
        state.failures.succeeded(member)
        fold = ev.Fold(lease, state.mode.staleness_of(lease))
        complete = state.mode.take(lease)
        advice = state.mode.advice()
        notes = [ev.Note("stale", advice)] if advice else []
        return [fold, *(self._steps.complete(complete, now) if complete is not None else ()), *notes]

    def verified(self, event: ev.Verified, now: float) -> list[ev.Effect]:
        state = self._state
        norm = state.verification.end(event.lease)
        if event.wrong:
            lease, _ = state.settle(event.node, event.lease, now)
            reason = f"an update of it was computed again, and is wrong: {event.wrong}"
            effects = state.rollback.convict(event, lease, reason, state.version)
            if isinstance(lease, Lease) and lease.step.validates:
                state.validation.give_back(lease)
            effects += self._validation.distrust(event.node)
            return effects + self._membership.evict(event.node, reason, now)
        effects = state.verification.count(event, state.progress)
        held = state.leases.get(event.lease)
        if held is not None and held.step.validates:
            return effects + self._validation.accept(event.node, event.lease, now)
        effects += self._accept(event.node, event.lease, norm, now, verified=True)
        return effects + self._lend_to(state.members.get(event.node), now)

    def failed(self, event: ev.Failed, now: float) -> list[ev.Effect]:
        lease, member = self._state.settle(event.node, event.lease, now)
        if isinstance(lease, str):
            return [ev.Reject(event.node, event.lease, lease, fenced=True), *self._lend_to(member, now)]
        if lease.step.validates:
            return self._validation.failed(lease, event.reason, now)
        return self._fail(lease, member, event.reason, event.norm, now)

    def _fail(
        self, lease: Lease, member: Member | None, reason: str, norm: float | None, now: float
    ) -> list[ev.Effect]:
        state = self._state
        effects, hopeless = state.failures.failed(lease, reason, norm)
        if hopeless is not None:
            effects += self._set_aside(hopeless, lease, reason, now)
            # In a pool nothing is left to lend, and no node was at fault.
            if state.is_finished or state.settings.all_or_nothing:
                return effects
        # A node whose update was rejected is judged when others have computed the same batches.
        broken = state.failures.is_broken(member) if member is not None and norm is None else ""
        if broken:
            return effects + self._membership.evict(lease.node, broken, now, bans=False)
        return effects + state.lend(state.members, now)

    def _set_aside(self, work: OpenStep, lease: Lease, reason: str, now: float) -> list[ev.Effect]:
        """Go on without a batch that fails wherever it is tried; in a pool, without its whole step."""
        state = self._state
        if state.settings.all_or_nothing:
            return self._steps.give_up(work, reason, state.failures.forgive(work, lease.span), now)
        effects = state.failures.set_aside(work, lease, reason)
        state.is_finished = isinstance(effects[-1], ev.Finish)
        complete = None if state.is_finished else state.mode.set_aside(lease.step.index, lease.span)
        return effects + (self._steps.complete(complete, now) if complete is not None else [])

    def dropped(self, event: ev.Dropped, now: float) -> list[ev.Effect]:
        state = self._state
        lease, member = state.settle(event.node, event.lease, now)
        if isinstance(lease, str):
            return self._lend_to(member, now)
        state.give_back(lease)
        expire = ev.Expire(event.node, [event.lease], "not sent, or not computed")
        text = state.members.cannot_hold(member, event.batches) if member is not None else ""
        notes = [ev.Note("little memory", text, {"node": event.node})] if text else []
        column = lease.step.leaf_batches
        if text and all(each.batches_max < column for each in state.members):
            # A column of a round cannot be divided. A node that can hold it may still come.
            need = f"no node that is here can hold the {column} batches of a column: let another join,"
            fix = "or begin a new run with --data local or cached, smaller batches, or fewer --local-steps"
            notes.append(ev.Note("little memory", f"{need} {fix}", {"batches": column}))
        return [expire, *notes, *state.lend(state.members, now)]

    def unreadable(self, event: ev.Unreadable, now: float) -> list[ev.Effect]:
        """Set the batches aside that cannot be read, and lend the others of their lease again."""
        state = self._state
        lease, member = state.settle(event.node, event.lease, now)
        if isinstance(lease, str):
            return self._lend_to(member, now)
        if lease.step.validates:
            effects = self._validation.unreadable(lease, event.reasons)
            return [*_not_read(event), *effects, *state.lend(state.members, now)]
        open_step = state.mode.give_back(lease, divided=True)
        effects = _not_read(event)
        # A stretch is not divided: its steps are planned again, one by one.
        if open_step is not None and not lease.step.apart:
            for leaf, reason in _leaves_of(lease.step, event.reasons).items():
                effects += self._set_unreadable_aside(open_step, replace(lease, span=leaf), reason, now)
        return effects + state.lend(state.members, now)

    def _set_unreadable_aside(
        self, open_step: OpenStep, leaf: Lease, reason: str, now: float
    ) -> list[ev.Effect]:
        """Go on without a batch that cannot be read. Other leases that hold it end too."""
        state = self._state
        if state.is_finished or open_step.tree.covers(leaf.span):
            return []
        effects: list[ev.Effect] = []
        for other in state.leases.of_step(leaf.step.index):
            if other.span.holds(leaf.span):
                state.leases.end(other)
                state.mode.give_back(other, divided=True)
                effects.append(ev.CancelLeases(other.node, [other.id]))
        return effects + self._set_aside(open_step, leaf, reason, now)

    def _lend_to(self, member: Member | None, now: float) -> list[ev.Effect]:
        return self._state.lend([member], now) if member is not None else []


def _not_read(event: ev.Unreadable) -> list[ev.Effect]:
    return [ev.Expire(event.node, [event.lease], "not sent: a batch cannot be read")]


def _leaves_of(step: StepPlan, reasons: Mapping[int, str]) -> dict[Span, str]:
    """The leaves of a step's tree that hold these batches of its epoch, with the reason of the first."""
    found: dict[Span, str] = {}
    for batch, reason in sorted(reasons.items()):
        leaf = (batch - step.first) % step.count
        found.setdefault(Span(leaf, leaf + 1), reason)
    return found
