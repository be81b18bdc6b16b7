"""The books: what a sound coordinator may do, kept apart from it and audited after every event.

What a node sends is the expression by which it was summed, so that the fold can be compared with the
canonical tree. Knows the core only from outside: its events, its effects, and the numbers it shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.control.invariants import check
from tests.sim.counter import Counter, Sum, batches_of, column, is_leaf, leaves_of
from tests.sim.scenario import Scenario
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.membership import TICK_SECONDS
from w5xde.control.modes.async_mode import STRETCH_STEPS_MAX
from w5xde.control.modes.sync import WINDOW_LEASES
from w5xde.control.pool.members import SILENCE_SECONDS, STALL_SECONDS
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import ATTEMPTS_MAX, failing_nodes_required
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import is_aligned

# The core rounds nothing, but sums its seconds in another order than we do.
EPSILON_SECONDS = 1e-6


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def canonical(leaves: Sequence[Sum]) -> Sum:
    """How these must be summed: written anew, not borrowed from the code under test."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return (canonical(leaves[:half]), canonical(leaves[half:]))


def without(total: Sum, aside: set[int]) -> Sum | None:
    """The same sum, with nothing in the places of these batches, and of columns that are made of them."""
    if is_leaf(total):
        return None if aside.issuperset(batches_of(total)) else total
    left, right = without(total[0], aside), without(total[1], aside)
    return (left, right) if left is not None and right is not None else left or right


def batches_in(plan: StepPlan, leaf: int) -> list[int]:
    """The batches in one place of a step's tree: one, or in a round those of a column."""
    if not plan.columns:
        return [plan.first + leaf]
    return list(range(plan.first + leaf, plan.first + len(plan.sizes), plan.columns))


def leaves_in(plan: StepPlan, version: int, start: str) -> list[Sum]:
    """What nodes must give for each place of a step's tree; `start` is what columns of a round start from."""
    batches = [[(plan.epoch, batch, version) for batch in batches_in(plan, i)] for i in range(plan.count)]
    return [column(start, some) if plan.columns else some[0] for some in batches]


def versions_of(total: Sum) -> list[int]:
    return [version for _, _, version in leaves_of(total)]


@dataclass(slots=True)
class Hand:
    """What a node holds: the leases sent to it and not yet answered, and when it was last heard."""

    leases: set[int] = field(default_factory=set)
    heard_awake: float = 0.0
    heard_strict: float = 0.0


class Books:
    """Written from events and effects alone; raises as soon as something does not add up."""

    def __init__(
        self, core: CoordinatorCore, scenario: Scenario, counter: Counter, past: Books | None, now: float
    ) -> None:
        """The books of one life; lease numbers of earlier ones must never come again."""
        self._core = core
        self._scenario = scenario
        self._counter = counter
        self.leases: dict[int, Lease] = past.leases if past is not None else {}
        self.stepped_at: dict[int, float] = past.stepped_at if past is not None else {}
        self._aside = {(each.epoch, each.batch) for each in core.view.accounts.aside}
        self._outstanding: dict[int, Lease] = {}
        self._hands: dict[str, Hand] = {}
        self._there: dict[int, set[int]] = {}
        self._failures: dict[tuple[int, int], list[str]] = {}
        # Places of steps with a batch that could not be read.
        self._unreadable: set[tuple[int, int]] = set()
        self._version = core.view.version
        # Steps and stretches that were decided in this life, in all and before each lease.
        self._updates = 0
        self._updates_at: dict[int, int] = {}
        self._has_stretched = False
        # Steps begun before: those may be finished although the run is to stop.
        self._begun = core.view.plan.cursor.index - 1
        self._is_closing = False
        self.is_over = False
        self._started_at = math.inf
        # Of training, in earlier lives.
        self._seconds = core.view.seconds(0.0)
        # In a pool: the number of the caller's weights in each call.
        self.weights: dict[int, int] = {}
        # Our own time, with and without the moments for which nobody is blamed.
        self._ticked_at = now
        self._awake = self._strict = 0.0

    # --- one event --------------------------------------------------------------------------------

    def handled(self, event: ev.Event, effects: list[ev.Effect], now: float) -> None:
        """The core was told `event` and wants `effects`: may it?"""
        was_closing = self._is_closing
        match event:
            case ev.Joined():
                self._hands[event.node] = Hand(set(), self._awake_at(now), self._strict_at(now))
            # After the end the core takes no notice of nodes any more.
            case ev.Left() if not self.is_over:
                self._gone(event.node)
            case ev.Answered() | ev.Measured() | ev.Failed() | ev.Dropped() | ev.Unreadable() if (
                not self.is_over
            ):
                self._returned(event)
            case ev.Ticked():
                self._tick(now)
                limit = self._scenario.seconds_limit
                self._is_closing |= limit is not None and self._seconds + now - self._started_at >= limit
            case ev.Stop():
                self._is_closing = True
            case _:
                pass
        for effect in effects:
            self._audit(event, effect, was_closing, now)
        if isinstance(event, ev.Ticked):
            self._nobody_stays_silent()
        if isinstance(event, ev.Dropped) and not self.is_over:
            held = self._outstanding.get(event.lease)
            if held is not None and held.node == event.node:
                del self._outstanding[event.lease]
        self.is_over |= any(isinstance(effect, ev.Finish) for effect in effects)
        lent = {lease.id for lease in self._core.view.leases}
        if lent != self._outstanding.keys():
            raise AssertionError(f"outstanding are {sorted(lent)}, not {sorted(self._outstanding)}")
        if self._core.view.version != self._version:
            raise AssertionError(f"version {self._core.view.version} after {self._version} steps")
        check(self._core)

    def _audit(self, event: ev.Event, effect: ev.Effect, was_closing: bool, now: float) -> None:
        match effect:
            case ev.Assign():
                self._assigned(effect, was_closing)
                if not effect.leases[0].step.validates:
                    self._started_at = min(self._started_at, now)
            case ev.CancelLeases():
                for number in effect.leases:
                    lease = self._outstanding.pop(number, None)
                    require(
                        lease is not None and lease.node == effect.node, f"{effect} cancels what is not lent"
                    )
            case ev.Reject():
                require(
                    isinstance(event, ev.Answered | ev.Measured | ev.Failed | ev.Verified)
                    and event.node == effect.node
                    and effect.lease in leases_of(event),
                    f"{effect} answers {event}",
                )
                require(bool(effect.reason), f"{effect} gives no reason")
                held = self._outstanding.get(effect.lease)
                if held is not None and held.node == effect.node:
                    del self._outstanding[effect.lease]
                    if effect.reason.startswith("its norm"):
                        self._has_failed(held)
            case ev.KeepMeasures():
                lease = effect.lease
                require(lease.step.validates, f"{lease} is of a step, and is measured")
                require(self._outstanding.pop(lease.id, None) == lease, f"{effect} is not outstanding")
            case ev.Fold():
                require(not effect.lease.step.validates, f"{effect} of a validation")
                self._may_fold(event, effect.lease)
                self._folded(effect.lease)
            case ev.Step():
                require(
                    effect.version == self._version,
                    f"step {effect.plan.index} is to be version {effect.version}",
                )
                self._version += self._steps_of(effect.plan)
                self._updates += 1
            case ev.Close():
                if effect.reason.startswith("silent"):
                    silent = self._awake_at(now) - self._hands[effect.node].heard_awake
                    require(
                        silent > SILENCE_SECONDS - EPSILON_SECONDS,
                        f"{effect} after {silent:.2f} s of silence",
                    )
                self._gone(effect.node)
            case ev.Ban():
                is_liar = "liar" in self._scenario.faults and effect.node.partition("-")[0] == "n0"
                require(is_liar, f"{effect}, who never lied")
            case ev.Reopen():
                self._reopened(effect)
            case ev.Finish():
                self._finished(effect)
            case ev.Expire():
                for number in effect.leases:
                    self._outstanding.pop(number, None)
            case ev.SetAside(is_all=True):
                self._may_give_up(event, effect)
            case ev.SetAside():
                self._may_set_aside(effect)
            case ev.Note(kind="epoch"):
                epoch = effect.facts["epoch"] - 1
                counts, expected = self._counter.counts[epoch], self._expected_counts(epoch)
                require(counts == expected, f"{effect.text}, but its samples count {counts}")
                aside = [batch for of, batch in sorted(self._aside) if of == epoch]
                require(
                    sorted(effect.facts["aside"]) == aside and (self._scenario.skip_bad_batches or not aside),
                    f"{effect.text} although {aside} are set aside",
                )

    # --- leases -----------------------------------------------------------------------------------

    def _assigned(self, effect: ev.Assign, was_closing: bool) -> None:
        require(effect.node in self._hands, f"{effect} lends to somebody who is not here")
        hand = self._hands[effect.node]
        for lease in effect.leases:
            wrong = self._wrong_with(lease, effect.node, was_closing)
            if wrong:
                raise AssertionError(f"{lease} {wrong}")
            if not lease.step.validates:
                self._begun = max(self._begun, lease.step.index + lease.step.steps - 1)
            self._updates_at[lease.id] = self._updates
            self._has_stretched |= lease.step.apart
            self.leases[lease.id] = self._outstanding[lease.id] = lease
            hand.leases.add(lease.id)
        is_single = self._scenario.mode == "async" and not self._scenario.validation
        allowed = 1 if is_single else WINDOW_LEASES
        held = len(hand.leases)
        require(held <= allowed, f"{effect.node} holds {held} leases, {allowed} are allowed")

    def _wrong_with(self, lease: Lease, node: str, was_closing: bool) -> str:
        step = lease.step
        if step.validates:
            return self._wrong_with_validation(lease, node)
        if self._scenario.is_rounds and step.steps != self._steps_of(step):
            return f"is of a round of {step.steps} steps, {self._steps_of(step)} were planned"
        planned = (
            self._scenario.planned(step.index, step.steps)
            if step.index >= 0
            else (step.epoch, step.first, self._scenario.epochs[step.epoch][step.first : step.first + 1])
        )
        if lease.id in self.leases:
            return "is given twice"
        if lease.node != node:
            return f"is sent to {node}"
        if lease.version != self._version:
            return f"is of another version than {self._version}"
        if not is_aligned(lease.span, step.count):
            return "is no part of the tree"
        if self._scenario.is_rounds and (lease.span.count != 1 or not step.columns):
            return "is not one column"
        if was_closing and step.index > self._begun:
            return "begins although the run is to stop"
        return "" if (step.epoch, step.first, step.sizes) == planned else "is not as planned"

    def _wrong_with_validation(self, lease: Lease, node: str) -> str:
        if lease.id in self.leases or lease.node != node:
            return f"is given twice, or to {node}"
        if lease.version != self._version:
            return f"is of another version than {self._version}"
        if not is_aligned(lease.span, lease.step.count):
            return "is no part of the tree"
        return "" if lease.step.sizes == self._scenario.validation else "is of another set"

    def _steps_of(self, plan: StepPlan) -> int:
        """How many versions the step makes, a round as many as were planned for it."""
        if self._scenario.is_rounds:
            return self._scenario.rounds[plan.index] if plan.index >= 0 else 1
        return plan.steps

    def _returned(self, event: ev.Answered | ev.Measured | ev.Failed | ev.Dropped | ev.Unreadable) -> None:
        if event.node in self._hands:
            self._hands[event.node].leases.difference_update(leases_of(event))
        if isinstance(event, ev.Unreadable):
            step = self.leases[event.lease].step
            self._unreadable |= {(step.index, (batch - step.first) % step.count) for batch in event.reasons}
        lease = self._outstanding.get(event.lease) if isinstance(event, ev.Failed) else None
        if lease is not None and lease.node == event.node:
            self._has_failed(lease)

    def _has_failed(self, lease: Lease) -> None:
        for batch in range(lease.span.start, lease.span.stop):
            self._failures.setdefault((lease.step.index, batch), []).append(lease.node)

    def _gone(self, node: str) -> None:
        self._hands.pop(node, None)
        self._outstanding = {n: lease for n, lease in self._outstanding.items() if lease.node != node}

    # --- folding and stepping ---------------------------------------------------------------------

    def _may_fold(self, event: ev.Event, lease: Lease) -> None:
        require(isinstance(event, ev.Answered | ev.Verified), f"{event} is no answer, but {lease} is folded")
        if isinstance(event, ev.Answered | ev.Verified):
            is_its = event.node == lease.node and lease.id in leases_of(event)
            require(is_its, f"{event} is folded as {lease}")
        require(self._outstanding.pop(lease.id, None) == lease, f"{lease} is folded, but is not outstanding")
        stale = self._updates - self._updates_at[lease.id]
        bound = self._scenario.staleness if self._scenario.mode == "async" else 0
        require(stale <= bound, f"{lease} is {stale} updates old, {bound} are allowed")

    def _folded(self, lease: Lease) -> None:
        """The update of the lease is to be given its place."""
        there = self._there.setdefault(lease.step.index, set())
        batches = range(lease.span.start, lease.span.stop)
        require(not there.issuperset(batches), f"step {lease.step.index} has every batch of {lease} already")
        there.update(batches)

    def _reopened(self, effect: ev.Reopen) -> None:
        """A step was decided and not made: neither was any after it, and what was lent on them is older."""
        self._version = min(self._version, effect.version)
        self._there.pop(effect.plan.index, None)
        for number, lease in self._outstanding.items():
            self._outstanding[number] = replace(lease, version=min(lease.version, self._version))

    def _may_set_aside(self, effect: ev.SetAside) -> None:
        require(not self._scenario.is_pool, f"{effect}, and the rest of its call goes on")
        plan, (start, stop) = effect.plan, effect.span
        for batch in range(start, stop):
            if (plan.index, batch) not in self._unreadable:
                self._have_failed(effect, self._failures.get((plan.index, batch), []))
            keys = {(plan.epoch, each) for each in batches_in(plan, batch)}
            require(not keys & self._aside, f"{effect} once more")
            self._aside |= keys

    def _have_failed(self, effect: ev.SetAside, failures: list[str]) -> None:
        """Enough nodes have tried a batch, and often enough, to do without it."""
        require(len(failures) >= ATTEMPTS_MAX, f"{effect} after {len(failures)} failures")
        others = self._able(effect.plan.leaf_batches) - set(failures)
        is_enough = len(set(failures)) >= failing_nodes_required(len(self._hands))
        require(is_enough or not others, f"{effect}, but only {set(failures)} tried")

    def _may_give_up(self, event: ev.Event, effect: ev.SetAside) -> None:
        """A call is given up by its caller, or by one of its batches that failed everywhere it was tried."""
        plan = effect.plan
        require(self._scenario.is_pool and effect.span == (0, plan.count), f"{effect} in a run")
        tried = [self._failures.get((plan.index, batch), []) for batch in range(plan.count)]
        enough = failing_nodes_required(len(self._hands))
        hopeless = [
            each
            for each in tried
            if len(each) >= ATTEMPTS_MAX and (len(set(each)) >= enough or not self._able(1) - set(each))
        ]
        require(isinstance(event, ev.Withdrawn | ev.Undone) or bool(hopeless), f"{effect} after {event}")
        self._aside |= {(plan.epoch, plan.first + batch) for batch in range(plan.count)}
        self._there.pop(plan.index, None)
        self._version += 1

    def _able(self, batches: int) -> set[str]:
        """The nodes that surely can be lent so many batches at once.

        One that dropped a message is lent half as much, perhaps less than it could hold.
        """
        return {node for node in self._hands if self._scenario.can_hold(node, 2 * batches - 1)}

    def summed(self, effect: ev.Step, total: Sum) -> None:
        """The learner is to step, by this sum."""
        plan = effect.plan
        aside = {batch for epoch, batch in self._aside if epoch == plan.epoch}
        if self._scenario.mode != "async":
            computed_on = self.weights[plan.epoch] if self._scenario.is_pool else effect.version
            ours = canonical(leaves_in(plan, computed_on, self._counter.start))
            require(total == without(ours, aside), f"step {plan.index} is summed as {total}")
        else:
            # Parts of a step that failed in between, or of which a batch was set aside, are as old as they
            # were when they came.
            is_whole = len(effect.shares) == 1 and len(batches_of(total)) == plan.count
            # A stretch is one update, and makes several versions.
            most = self._scenario.staleness * (STRETCH_STEPS_MAX if self._has_stretched else 1)
            stale = effect.version - max(versions_of(total)) if is_whole else 0
            require(stale <= most, f"step {plan.index} is {stale} versions old")
        if plan.apart:
            require(len(effect.shares) == 1, f"stretch {plan.index} is made of {len(effect.shares)} parts")
        shared = [batch for start, stop, _, _ in effect.shares for batch in range(start, stop)]
        expected = [i for i in range(plan.count) if not aside.issuperset(batches_in(plan, i))]
        require(shared == expected, f"step {plan.index} is shared out as {effect.shares}")
        batches = [batch for i in expected for batch in batches_in(plan, i)]
        require(batches_of(total) == batches, f"step {plan.index} is made of batches {batches_of(total)}")
        require(self._counter.version == effect.version, f"{effect} after {self._counter.version} steps")

    def applied(self, effect: ev.Step, now: float) -> None:
        """The learner has stepped."""
        counts = self._counter.counts[effect.plan.epoch]
        require(max(counts) <= 1, f"a sample of epoch {effect.plan.epoch} counts {max(counts)} times")
        self.stepped_at[effect.plan.index] = now

    def _expected_counts(self, epoch: int) -> list[int]:
        """Each sample once, but those of batches that were set aside."""
        sizes = self._scenario.epochs[epoch]
        return [
            0 if (epoch, batch) in self._aside else 1 for batch, size in enumerate(sizes) for _ in range(size)
        ]

    def expected_value(self) -> str:
        """The weights that all steps come to, one after another, in a run that nothing disturbs."""
        undisturbed = Counter(self._scenario)
        for plan in self._scenario.plans():
            total = canonical(leaves_in(plan, plan.index, undisturbed.start))
            undisturbed.apply(ev.Step(plan, plan.index, []), total)
        return undisturbed.value

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
        progress, applied = self._core.view.progress, self._counter.version
        if self._scenario.is_pool:
            applied = len(self.stepped_at)  # calls that were given up make versions too
        require(progress.steps <= applied, f"{progress.steps} steps are counted, {applied} applied")
        if found := re.match(r"no node can hold the (\d+) batches", finish.error):
            able = self._able(int(found[1]))
            require(not able, f"given up although {able} are there: {finish.error}")
            return
        if finish.error and self._unreadable:
            return
        if finish.error:
            worst = max(self._failures.values(), key=len, default=[])
            require(len(worst) >= ATTEMPTS_MAX, f"given up after {len(worst)} failures: {finish.error}")
            return
        require(progress.steps == applied, f"{progress.steps} steps are counted, {applied} applied")
        counted = sum(map(sum, self._counter.counts))
        require(progress.samples == counted, f"{progress.samples} samples are counted, not {counted}")
        if finish.reason != "all steps done":
            require(self._is_closing, f"{finish}, but nobody asked to stop")
            return
        ends = {epoch: first + len(sizes) for epoch, first, sizes in self._scenario.steps}
        whole = sum(len(self._scenario.epochs[epoch]) == end for epoch, end in ends.items())
        require(progress.epochs == whole, f"all done, but {progress.epochs} epochs of {whole} are complete")
        for epoch, first, sizes in self._scenario.steps:
            start = first * self._scenario.batch_size
            stop = start + sum(sizes)
            require(
                self._counter.counts[epoch][start:stop] == self._expected_counts(epoch)[start:stop],
                f"all done, but batches {first} to {first + len(sizes)} of epoch {epoch} count "
                f"{self._counter.counts[epoch][start:stop]}",
            )


def leases_of(
    event: ev.Answered | ev.Measured | ev.Failed | ev.Verified | ev.Dropped | ev.Unreadable,
) -> Sequence[int]:
    return event.leases if isinstance(event, ev.Answered) else [event.lease]
