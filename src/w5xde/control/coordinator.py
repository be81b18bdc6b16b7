"""The coordinator's mind: routes events to plan, members, leases and mode, and collects effects.

Holds no rule of its own beyond the order of things. The real coordinator and the simulator drive this
very code: `for effect in core.handle(event, now): perform(effect)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from w5xde.control.events import (
    Answered,
    Assign,
    Broke,
    Cancel,
    Close,
    Discovered,
    Dropped,
    Effect,
    Evaluate,
    Event,
    Failed,
    Finish,
    Fold,
    Joined,
    Left,
    Note,
    Reject,
    Step,
    Stepped,
    Stop,
    Ticked,
)
from w5xde.control.leases import Lease, Leases
from w5xde.control.members import Member, Members
from w5xde.control.modes import Async, Mode, Sync
from w5xde.control.plan import Plan, StepPlan
from w5xde.control.work import StepWork
from w5xde.tree import Span

# Fine enough to overtake a late batch soon, coarse enough to cost nothing.
TICK_SECONDS = 0.1
# A node on which this many leases in a row fail, while others manage, is broken.
FAILURES_IN_A_ROW_MAX = 5


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core must know of the run's settings."""

    mode: str
    staleness: int = 16
    seconds: float | None = None
    evaluate_every: int | None = None
    evaluates: bool = False
    incarnation: int = 1


@dataclass(slots=True)
class Progress:
    """How far the run is: plain counts, for views and summaries."""

    steps: int = 0
    epochs: int = 0
    batches: int = 0
    samples: int = 0


class CoordinatorCore:
    """All decisions of a run, as one state machine."""

    def __init__(self, plan: Plan, settings: CoreSettings) -> None:
        self.plan = plan
        self.members = Members()
        self.leases = Leases(settings.incarnation)
        self.mode: Mode = (
            Sync(plan, self.members, self.leases)
            if settings.mode == "sync"
            else Async(plan, self.members, self.leases, settings.staleness)
        )
        # How many steps were decided; the learner applies them in this order, maybe a moment later.
        self.version = 0
        self.progress = Progress()
        self.started_at: float | None = None
        self.is_finished = False
        self._settings = settings
        self._stop_reason = ""
        self._applying: dict[int, StepPlan] = {}
        # Epoch -> batches applied, and (once its last step is known) how many it has.
        self._epoch_applied: dict[int, int] = {}
        self._epoch_batches: dict[int, int] = {}
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            Joined: self._joined,
            Left: self._left,
            Answered: self._answered,
            Failed: self._failed,
            Dropped: self._dropped,
            Discovered: self._discovered,
            Stepped: self._stepped,
            Broke: self._broke,
            Stop: self._stop,
            Ticked: self._ticked,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Everything that should happen because of this event, in order."""
        if self.is_finished:
            return []
        return self._handlers[type(event)](event, now)

    # --- who is here ------------------------------------------------------------------------------

    def _joined(self, event: Joined, now: float) -> list[Effect]:
        member = self.members.join(event.node, now)
        note = Note("joined", f"{event.node} joined", {"node": event.node})
        return [note, *self._lend([member], now)]

    def _left(self, event: Left, now: float) -> list[Effect]:
        member = self.members.leave(event.node)
        if member is None:
            return []
        given_back = 0
        for lease in self.leases.of_node(event.node):
            self.leases.end(lease)
            self.mode.give_back(lease)
            given_back += lease.span.count
        text = f"{event.node} left ({event.reason})"
        if given_back:
            text += f"; its {given_back} batch{'es' * (given_back > 1)} will be lent again"
        note = Note("left", text, {"node": event.node, "reason": event.reason, "batches": given_back})
        return [note, *self._lend(self.members, now), *self._finish_if_settled()]

    def _ticked(self, event: Ticked, now: float) -> list[Effect]:
        effects: list[Effect] = []
        stall = self.members.forgive_stall(now, TICK_SECONDS)
        if stall:
            effects.append(
                Note("stalled", f"the coordinator stood still for {stall:.1f} s", {"seconds": stall})
            )
        for member in self.members.silent(now):
            reason = f"silent for {now - member.heard_at:.1f} s"
            effects += [
                Close(member.name, reason, for_good=False),
                *self._left(Left(member.name, reason), now),
            ]
        limit = self._settings.seconds
        if limit is not None and self.started_at is not None and now - self.started_at >= limit:
            effects += self._stop(Stop("time is up"), now)
        if self.is_finished:
            return effects
        self.mode.overtake(now)
        idle = [member for member in self.members if not member.pending]
        return effects + self._lend(idle, now)

    # --- what comes back --------------------------------------------------------------------------

    def _answered(self, event: Answered, now: float) -> list[Effect]:
        lease, member = self._settle(event.node, event.lease, now)
        if member is not None:
            self.members.measured(member, event.batch_seconds, event.compute_seconds)
        if isinstance(lease, str):
            return [Reject(event.node, event.lease, lease), *self._lend_to(member, now)]
        if member is not None:
            member.failures_in_a_row = 0
        reason = self.mode.admit(lease, self.version)
        if reason:
            self.mode.give_back(lease)
            return [Reject(event.node, event.lease, reason), *self._lend_to(member, now)]
        effects: list[Effect] = [Fold(lease)]
        complete = self.mode.take(lease)
        if complete is not None:
            effects += self._step(complete)
        return effects + self._lend_to(member, now)

    def _failed(self, event: Failed, now: float) -> list[Effect]:
        lease, member = self._settle(event.node, event.lease, now)
        if isinstance(lease, str):
            return [Reject(event.node, event.lease, lease), *self._lend_to(member, now)]
        work = self.mode.give_back(lease, failed=True)
        first = lease.step.first + lease.span.start
        last = lease.step.first + lease.span.stop - 1
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        where = f"{batches} of epoch {lease.step.epoch + 1}"
        effects: list[Effect] = [
            Reject(event.node, event.lease, event.reason),
            Note("failed", f"{event.node} could not compute {where}: {event.reason}", {"node": event.node}),
        ]
        if work is not None and work.is_hopeless(lease.span, self.members):
            return effects + self._finish("", error=f"{where} fails wherever it is tried: {event.reason}")
        if member is not None:
            member.failures_in_a_row += 1
            if member.failures_in_a_row >= FAILURES_IN_A_ROW_MAX and len(self.members) > 1:
                reason = f"{member.failures_in_a_row} leases in a row failed there"
                return [
                    *effects,
                    Close(member.name, reason, for_good=True),
                    *self._left(Left(member.name, reason), now),
                ]
        return effects + self._lend(self.members, now)

    def _dropped(self, event: Dropped, now: float) -> list[Effect]:
        lease, member = self._settle(event.node, event.lease, now)
        if isinstance(lease, Lease):
            self.mode.give_back(lease)
            return self._lend(self.members, now)
        return self._lend_to(member, now)

    def _settle(self, node: str, number: int, now: float) -> tuple[Lease | str, Member | None]:
        member = self.members.get(node)
        if member is not None:
            self.members.returned(member, number, now)
        return self.leases.settle(number, node), member

    # --- steps ------------------------------------------------------------------------------------

    def _step(self, work: StepWork) -> list[Effect]:
        step = work.plan
        needless: dict[str, list[int]] = {}
        for lease in self.leases.of_step(step.index):
            self.leases.end(lease)
            needless.setdefault(lease.node, []).append(lease.id)
        effects: list[Effect] = [Cancel(node, leases) for node, leases in needless.items()]
        self._applying[step.index] = step
        effects.append(Step(step, self.version, work.tree.take(Span(0, step.count))))
        self.version += 1
        return effects

    def _stepped(self, event: Stepped, now: float) -> list[Effect]:
        step = self._applying.pop(event.step)
        self.progress.steps += 1
        self.progress.batches += step.count
        self.progress.samples += step.samples
        effects = self._count_epoch(step)
        waiting = self.mode.stepped(event.step)
        ending = self._finish_if_settled()
        every = self._settings.evaluate_every
        is_due = self.progress.steps % every == 0 if every else bool(effects)
        # The end has an evaluation of its own.
        if self._settings.evaluates and is_due and not ending:
            effects.append(Evaluate(self.progress.steps))
        return [*effects, *ending, *self._lend(waiting, now)]

    def _count_epoch(self, step: StepPlan) -> list[Effect]:
        self._epoch_applied[step.epoch] = self._epoch_applied.get(step.epoch, 0) + step.count
        if step.ends_epoch:
            self._epoch_batches[step.epoch] = step.first + step.count
        if self._epoch_applied[step.epoch] != self._epoch_batches.get(step.epoch):
            return []
        del self._epoch_applied[step.epoch], self._epoch_batches[step.epoch]
        self.progress.epochs += 1
        return [Note("epoch", f"epoch {step.epoch + 1} is complete", {"epoch": step.epoch + 1})]

    def _discovered(self, event: Discovered, now: float) -> list[Effect]:
        self.plan.discovered(event.epoch, event.samples)
        return self._lend([member for member in self.members if not member.pending], now)

    # --- the end ----------------------------------------------------------------------------------

    def _stop(self, event: Stop, now: float) -> list[Effect]:
        self._stop_reason = self._stop_reason or event.reason
        self.mode.is_closing = True
        return self._finish_if_settled()

    def _broke(self, event: Broke, now: float) -> list[Effect]:
        return self._finish("", error=event.reason)

    def _finish_if_settled(self) -> list[Effect]:
        if not self.mode.is_settled or self.is_finished:
            return []
        if self._stop_reason:
            return self._finish(self._stop_reason)
        return self._finish("all steps done") if self.plan.is_over else []

    def _finish(self, reason: str, error: str = "") -> list[Effect]:
        self.is_finished = True
        return [Finish(reason, error)]

    # --- lending ----------------------------------------------------------------------------------

    def _lend_to(self, member: Member | None, now: float) -> list[Effect]:
        return self._lend([member], now) if member is not None else []

    def _lend(self, candidates: Iterable[Member], now: float) -> list[Effect]:
        if self.is_finished:
            return []
        granted = self.mode.grants(candidates, self.version, now)
        if granted and self.started_at is None:
            self.started_at = now
        return [Assign(leases[0].node, leases) for leases in granted]

    # --- invariants -------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that must hold between two events; tests call it after each of them."""
        for lease in self.leases:
            _require(lease.node in self.members, f"{lease} is held by nobody")
            member = self.members.get(lease.node)
            _require(member is not None and lease.id in member.pending, f"{lease} is not in its node's hands")
            _require(lease.version <= self.version, f"{lease} comes from the future")
        for work in self.mode.open_works:
            held = [lease.span for lease in self.leases.of_step(work.plan.index)]
            for batch in range(work.plan.count):
                one = Span(batch, batch + 1)
                free = sum(span.holds(one) for span in work.free)
                _require(free <= 1, f"batch {batch} of step {work.plan.index} is free twice")
                known = free or work.tree.covers(one) or any(span.holds(one) for span in held)
                _require(bool(known), f"batch {batch} of step {work.plan.index} is lost")
            _require(
                work.free_batches == sum(span.count for span in work.free),
                f"step {work.plan.index} miscounts its free batches",
            )
        pending = sum(sum(member.pending.values()) for member in self.members)
        _require(pending == self.members.pending_batches, "pending batches are miscounted")
        rate = sum(member.rate for member in self.members)
        _require(
            abs(rate - self.members.pool_rate) <= 1e-6 * max(1.0, rate), "the pool's speed is miscounted"
        )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)
