"""The books: what a sound coordinator may do, kept apart from it and audited after every event.

The gradient of a batch is a counting model: applying a step adds 1 to each of its samples. What a node
sends is the expression by which it was summed, so that the fold can be compared with the canonical tree.
Knows the core only from outside: its events, its effects, and the numbers it shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tests.sim.scenario import Scenario
from w5xde.control import events as ev
from w5xde.control.coordinator import TICK_SECONDS, CoordinatorCore
from w5xde.control.leases import Lease
from w5xde.control.members import SILENCE_SECONDS, STALL_SECONDS
from w5xde.control.modes import WINDOW_LEASES
from w5xde.control.work import ATTEMPTS_MAX
from w5xde.tree import PairwiseTree, Span, is_aligned

# A sum is a pair of sums, or a batch: (epoch, batch, version of the parameters it was computed on).
Sum = tuple[Any, ...]
# The core rounds nothing, but sums its seconds in another order than we do.
EPSILON_SECONDS = 1e-6


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def canonical(epoch: int, start: int, stop: int, version: int) -> Sum:
    """How batches `start` to `stop` must be summed: written anew, not borrowed from the code under test."""
    count = stop - start
    if count == 1:
        return (epoch, start, version)
    half = 1
    while 2 * half < count:
        half *= 2
    return (canonical(epoch, start, start + half, version), canonical(epoch, start + half, stop, version))


def versions_of(total: Sum) -> list[int]:
    if len(total) == 3:
        return [total[2]]
    return versions_of(total[0]) + versions_of(total[1])


@dataclass(slots=True)
class Hand:
    """What a node holds: the leases sent to it and not yet answered, and when it was last heard."""

    leases: set[int] = field(default_factory=set)
    heard_awake: float = 0.0
    heard_strict: float = 0.0


class Books:
    """Written from events and effects alone; raises as soon as something does not add up."""

    def __init__(self, core: CoordinatorCore, scenario: Scenario) -> None:
        self._core = core
        self._scenario = scenario
        self.leases: dict[int, Lease] = {}
        self._outstanding: dict[int, Lease] = {}
        self._hands: dict[str, Hand] = {}
        self._trees: dict[int, PairwiseTree[Sum]] = {}
        self._there: dict[int, set[int]] = {}
        self._counts = [[0] * sum(sizes) for sizes in scenario.epochs]
        self._failures: dict[tuple[int, int], list[str]] = {}
        self.stepped_at: dict[int, float] = {}
        self._applied: list[int] = []
        self._version = 0
        self._begun = -1
        self._is_closing = False
        self._started_at = math.inf
        # Our own time, with and without the moments for which nobody is blamed.
        self._ticked_at = 0.0
        self._awake = self._strict = 0.0

    # --- one event --------------------------------------------------------------------------------

    def handled(self, event: ev.Event, effects: list[ev.Effect], now: float) -> None:
        """The core was told `event` and wants `effects`: may it?"""
        was_closing = self._is_closing
        match event:
            case ev.Joined():
                self._hands[event.node] = Hand(set(), self._awake_at(now), self._strict_at(now))
            case ev.Left():
                self._gone(event.node)
            case ev.Answered() | ev.Failed() | ev.Dropped():
                self._returned(event)
            case ev.Ticked():
                self._tick(now)
                limit = self._scenario.seconds_limit
                self._is_closing |= limit is not None and now - self._started_at >= limit
            case ev.Stop():
                self._is_closing = True
            case _:
                pass
        for effect in effects:
            self._audit(event, effect, was_closing, now)
        if isinstance(event, ev.Ticked):
            self._nobody_stays_silent()
        if isinstance(event, ev.Dropped):
            self._outstanding.pop(event.lease, None)
        held = {lease.id for lease in self._core.leases}
        require(
            held == self._outstanding.keys(),
            f"outstanding are {sorted(held)}, not {sorted(self._outstanding)}",
        )
        require(
            self._core.version == self._version, f"version {self._core.version} after {self._version} steps"
        )
        self._core.check()

    def _audit(self, event: ev.Event, effect: ev.Effect, was_closing: bool, now: float) -> None:
        match effect:
            case ev.Assign():
                self._assigned(effect, was_closing)
                self._started_at = min(self._started_at, now)
            case ev.Cancel():
                for number in effect.leases:
                    lease = self._outstanding.pop(number, None)
                    require(
                        lease is not None and lease.node == effect.node, f"{effect} cancels what is not lent"
                    )
            case ev.Reject():
                require(
                    isinstance(event, ev.Answered | ev.Failed)
                    and (event.node, event.lease) == (effect.node, effect.lease),
                    f"{effect} answers {event}",
                )
                require(bool(effect.reason), f"{effect} gives no reason")
                held = self._outstanding.get(effect.lease)
                if held is not None and held.node == effect.node:
                    del self._outstanding[effect.lease]
            case ev.Fold():
                self._may_fold(event, effect.lease)
            case ev.Step():
                require(
                    effect.version == self._version,
                    f"step {effect.plan.index} is to be version {effect.version}",
                )
                self._version += 1
            case ev.Close():
                if effect.reason.startswith("silent"):
                    silent = self._awake_at(now) - self._hands[effect.node].heard_awake
                    require(
                        silent > SILENCE_SECONDS - EPSILON_SECONDS,
                        f"{effect} after {silent:.2f} s of silence",
                    )
                self._gone(effect.node)
            case ev.Finish():
                self._finished(effect)
            case ev.Note(kind="epoch"):
                counts = self._counts[effect.facts["epoch"] - 1]
                require(counts == [1] * len(counts), f"{effect.text}, but its samples count {counts}")

    # --- leases -----------------------------------------------------------------------------------

    def _assigned(self, effect: ev.Assign, was_closing: bool) -> None:
        require(effect.node in self._hands, f"{effect} lends to somebody who is not here")
        hand = self._hands[effect.node]
        for lease in effect.leases:
            require(lease.id not in self.leases, f"lease {lease.id} is given twice")
            require(lease.node == effect.node, f"{effect} sends a lease to the wrong node")
            require(lease.version == self._version, f"{lease} of another version than {self._version}")
            require(is_aligned(lease.span, lease.step.count), f"{lease} is no part of the tree")
            is_new = lease.step.index > self._begun
            require(
                not (was_closing and is_new), f"step {lease.step.index} begins although the run is to stop"
            )
            self._begun = max(self._begun, lease.step.index)
            planned = (lease.step.epoch, lease.step.first, lease.step.sizes)
            require(planned == self._scenario.steps[lease.step.index], f"{lease.step} is not as planned")
            self.leases[lease.id] = self._outstanding[lease.id] = lease
            hand.leases.add(lease.id)
        allowed = WINDOW_LEASES
        if self._scenario.mode == "async":
            allowed = max(1, (self._scenario.staleness + 1) // len(self._hands))
        require(
            len(hand.leases) <= allowed,
            f"{effect.node} holds {len(hand.leases)} leases, {allowed} are allowed",
        )

    def _returned(self, event: ev.Answered | ev.Failed | ev.Dropped) -> None:
        if event.node in self._hands:
            self._hands[event.node].leases.discard(event.lease)
        lease = self._outstanding.get(event.lease)
        if isinstance(event, ev.Failed) and lease is not None and lease.node == event.node:
            for batch in range(lease.span.start, lease.span.stop):
                self._failures.setdefault((lease.step.index, batch), []).append(event.node)

    def _gone(self, node: str) -> None:
        self._hands.pop(node, None)
        self._outstanding = {n: lease for n, lease in self._outstanding.items() if lease.node != node}

    # --- folding and stepping ---------------------------------------------------------------------

    def _may_fold(self, event: ev.Event, lease: Lease) -> None:
        require(isinstance(event, ev.Answered), f"{event} is no answer, but {lease} is folded")
        if isinstance(event, ev.Answered):
            require((event.node, event.lease) == (lease.node, lease.id), f"{event} is folded as {lease}")
        require(self._outstanding.pop(lease.id, None) == lease, f"{lease} is folded, but is not outstanding")
        stale = self._version - lease.version
        bound = self._scenario.staleness if self._scenario.mode == "async" else 0
        require(stale <= bound, f"{lease} is {stale} versions old, {bound} are allowed")

    def folded(self, lease: Lease, total: Sum) -> None:
        """What came for the lease is given its place."""
        tree = self._trees.setdefault(lease.step.index, PairwiseTree(lease.step.count, lambda a, b: (a, b)))
        there = self._there.setdefault(lease.step.index, set())
        batches = range(lease.span.start, lease.span.stop)
        require(not there.issuperset(batches), f"step {lease.step.index} has every batch of {lease} already")
        there.update(batches)
        tree.put(lease.span, total)

    def applied(self, effect: ev.Step, now: float) -> None:
        """The learner steps."""
        plan = effect.plan
        total = self._trees.pop(plan.index).take(Span(0, plan.count))
        if self._scenario.mode == "sync":
            ours = canonical(plan.epoch, plan.first, plan.first + plan.count, effect.version)
            require(total == ours, f"step {plan.index} is summed as {total}")
        else:
            stale = effect.version - min(versions_of(total))
            require(stale <= self._scenario.staleness, f"step {plan.index} is {stale} versions old")
        shared = [batch for start, stop, _ in effect.shares for batch in range(start, stop)]
        require(shared == list(range(plan.count)), f"step {plan.index} is shared out as {effect.shares}")
        counts = self._counts[plan.epoch]
        start = plan.first * self._scenario.batch_size
        for sample in range(start, start + plan.samples):
            counts[sample] += 1
            require(
                counts[sample] == 1, f"sample {sample} of epoch {plan.epoch} counts {counts[sample]} times"
            )
        self._applied.append(plan.index)
        self.stepped_at[plan.index] = now

    # --- silence ----------------------------------------------------------------------------------

    def heard(self, node: str, now: float) -> None:
        hand = self._hands.get(node)
        if hand is not None:
            hand.heard_awake, hand.heard_strict = self._awake_at(now), self._strict_at(now)

    def _awake_at(self, now: float) -> float:
        """Seconds the coordinator was awake, rather too many: a stop counts as the longest that is none."""
        return self._awake + min(now - self._ticked_at, TICK_SECONDS + STALL_SECONDS)

    def _strict_at(self, now: float) -> float:
        """The same, rather too few: a stop counts as one tick."""
        passed = now - self._ticked_at
        return self._strict + (passed if passed < TICK_SECONDS + STALL_SECONDS else TICK_SECONDS)

    def _tick(self, now: float) -> None:
        self._awake, self._strict, self._ticked_at = self._awake_at(now), self._strict_at(now), now

    def _nobody_stays_silent(self) -> None:
        # The tick that finds out may itself be late by almost a stop.
        most = SILENCE_SECONDS + TICK_SECONDS + STALL_SECONDS + EPSILON_SECONDS
        for node, hand in self._hands.items():
            silent = self._strict - hand.heard_strict
            require(silent <= most, f"{node} is silent for {silent:.1f} s and still here")

    # --- the end ----------------------------------------------------------------------------------

    def _finished(self, finish: ev.Finish) -> None:
        progress = self._core.progress
        require(
            progress.steps <= len(self._applied),
            f"{progress.steps} steps are counted, {self._applied} applied",
        )
        if finish.error:
            worst = max(self._failures.values(), key=len, default=[])
            require(len(worst) >= ATTEMPTS_MAX, f"given up after {len(worst)} failures: {finish.error}")
            return
        require(
            progress.steps == len(self._applied),
            f"{progress.steps} steps are counted, {self._applied} applied",
        )
        require(progress.samples == sum(map(sum, self._counts)), f"{progress.samples} samples are counted")
        if self._scenario.mode == "sync":
            require(self._applied == list(range(len(self._applied))), f"steps came as {self._applied}")
        if finish.reason != "all steps done":
            require(self._is_closing, f"{finish}, but nobody asked to stop")
            return
        expected = list(range(len(self._scenario.steps)))
        require(
            sorted(self._applied) == expected,
            f"all done, but {len(self._applied)} of {len(expected)} steps are",
        )
