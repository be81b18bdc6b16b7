"""The simulated world: virtual time, a network of lines, a disk, and a coordinator that dies and lives again.

A heap of (time, what happens). One seed decides everything, so any failure can be replayed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.books import Books, require
from tests.sim.coordinator import SimulatedCoordinator
from tests.sim.disk import VirtualDisk
from tests.sim.fakes import Arriving
from tests.sim.machine import Machine
from tests.sim.scenario import BATCHES_MAX, DAMAGE, Blow, Scenario
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.steps.leases import INCARNATION_SHIFT
from w5xde.messages import Update
from w5xde.runtime.durable.audit import audit_disk

# A run that needs more than this has lost its way: most seeds need a few hundred, those with sixty slow nodes
# some 300,000.
EVENTS_MAX = 2_000_000
# Retransmissions wait this long, then twice as long, and so on.
RETRANSMIT_SECONDS = 0.2
# How often a run whose epoch was not complete is resumed, once batches fail no more.
MENDS_MAX = 2
ANSWERS_REMEMBERED = 50


class Failure(AssertionError):
    """A seed found something; says which, and how to see it again."""


class Died(BaseException):
    """The coordinator's process ends here, in the middle of whatever it does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a simulated run went."""

    reason: str
    error: str
    seconds: float
    events: int
    steps: int
    lives: int
    points: int
    value: str
    fingerprint: int


class World:
    """One run, from the first connection to the last effect."""

    def __init__(self, scenario: Scenario, say: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.lives = 0
        self._say = say
        self._rng = random.Random(f"{scenario.seed} world")
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._count = 0
        self._fingerprint = 0
        self._is_calm = False
        self._mends = 0
        self._points = 0
        self._deaths = list(scenario.deaths)
        self._answers: list[tuple[str, Update, Arriving]] = []
        self._durable_steps = 0
        self._is_rotten = False
        self._was_aside = False
        self._spoiled: set[int] = set()
        # The versions whose validation has ended.
        self.validated: set[int] = set()
        self._deadline = scenario.deadline
        self.disk = VirtualDisk(random.Random(f"{scenario.seed} disk"), self.point)
        # The one that lives, and the last that lived.
        self.coordinator: SimulatedCoordinator | None = None
        self._latest: SimulatedCoordinator | None = None
        self.machines = [Machine(self, f"n{i}", seconds) for i, seconds in enumerate(scenario.nodes)]
        self._attempt(self._start)
        joins_at = scenario.joins_at or (0.0,) * len(self.machines)
        for machine, time in zip(self.machines, joins_at, strict=True):
            self.at(time, machine.boot)
        for blow in scenario.blows:
            self.at(blow.at, self._strike, blow)
        self.at(scenario.quiet_at, self._calm)

    @property
    def latest(self) -> SimulatedCoordinator:
        if self._latest is None:
            raise AssertionError("the coordinator never lived")
        return self._latest

    @property
    def core(self) -> CoordinatorCore:
        return self.latest.core

    @property
    def books(self) -> Books:
        return self.latest.books

    # --- time -------------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._order), act, args))

    def delay(self) -> float:
        seconds = self._rng.uniform(0.5, 1.0) * self.scenario.delay_seconds
        again = RETRANSMIT_SECONDS
        while not self._is_calm and self._rng.random() < self.scenario.loss_chance and again < 10:
            seconds += again
            again *= 2
        return seconds

    def run(self) -> Outcome:
        """Until the core says Finish; raises Failure, with the seed, if anything is not as it must be."""
        try:
            self.run_until(math.inf)
            self._require_clean()
        except Exception as error:
            seed = self.scenario.seed
            raise Failure(
                f"seed {seed}, at {self.now:.3f} s: {type(error).__name__}: {error}\n"
                f"replay: python -m tests.sim --seed {seed} --verbose"
            ) from error
        finish = self.latest.finished or ev.Finish("never")
        return Outcome(
            reason=finish.reason,
            error=finish.error,
            seconds=self.now,
            events=self._count,
            steps=self.core.view.progress.steps,
            lives=self.lives,
            points=self._points,
            value=self.latest.counter.value,
            fingerprint=self._fingerprint,
        )

    def run_until(self, time: float) -> None:
        """Let everything happen that happens before `time`, or before the end."""
        while not self._is_over() and (not self._heap or self._heap[0][0] < time):
            self._advance()

    def _is_over(self) -> bool:
        coordinator = self._latest
        if coordinator is None or coordinator.finished is None:
            return False
        error = coordinator.finished.error
        if "is not complete" in error and self._mends < MENDS_MAX:
            # Somebody mends the data, and goes on.
            self._mends += 1
            self._note(f"mended after: {error}")
            self._calm()
        elif self.disk.trouble:
            # The end could not be written: somebody makes room and goes on, to have it written.
            self._heal_disk()
        else:
            return True
        coordinator.finished = None
        self._end_life(power=False)
        return False

    def _advance(self) -> None:
        if not self._heap or self._heap[0][0] > self._deadline:
            raise AssertionError(f"not finished although all was calm since {self.scenario.quiet_at:.1f} s")
        self._count += 1
        if self._count > EVENTS_MAX:
            raise AssertionError(f"not finished after {EVENTS_MAX} events")
        self.now, _, act, args = heapq.heappop(self._heap)
        self._attempt(act, *args)

    def _require_clean(self) -> None:
        """The end: nothing more is wanted, and the ledger alone proves what the books know."""
        if self.core.handle(ev.Ticked(), self.now):
            raise AssertionError("a finished run still wants something")
        if self.scenario.is_pool:
            return  # it keeps no ledger
        finish = self.latest.finished
        report = audit_disk(self.disk, "run", self.latest.journal.ledger.head.sha256)
        found = report.findings
        require(report.is_clean, f"the audit found: {found.violations[:3]}")
        progress = self.core.view.progress
        counted = (found.steps, found.batches, found.samples, found.epochs)
        expected = (progress.steps, progress.batches, progress.samples, progress.epochs)
        require(counted == expected, f"the audit counts {counted}, the core {expected}")
        is_done = finish is not None and finish.reason == "all steps done"
        if self.scenario.mode != "async" and is_done and not self._was_aside:
            require(self.latest.counter.value == self.books.expected_value(), "the weights are not the same")
            due = self.scenario.validations
            require(due <= self.validated, f"versions {due - self.validated} were never validated")

    # --- the coordinator's lives ------------------------------------------------------------------

    def point(self, what: str) -> None:
        """An operation of the coordinator: here it may die."""
        self._points += 1
        if self._deaths and self._points >= self._deaths[0].point:
            self._note(f"dies at point {self._points}: {what}")
            raise Died

    def _attempt(self, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Died:
            self._end_life(power=self._deaths.pop(0).power)

    def _start(self) -> None:
        self.lives += 1
        self._note(f"the coordinator starts, life {self.lives}")
        before = self._latest
        self.coordinator = None
        try:
            coordinator = SimulatedCoordinator(self, before, is_resumed=self.lives > 1)
        except OSError as error:
            # Somebody makes room, or changes the disk, and tries again.
            self._note(f"cannot start: {error}")
            self.at(self.now + 1.0, self._start)
            return
        self.coordinator = self._latest = coordinator
        if coordinator.restored is not None:
            self._require_durable(coordinator)
            if "revenant" in self.scenario.faults:
                for answer in self._rng.sample(self._answers, min(5, len(self._answers))):
                    coordinator.later(self._rng.choice((0.0, 0.1, 1.0)), coordinator.inject, *answer)

    def _require_durable(self, coordinator: SimulatedCoordinator) -> None:
        steps = coordinator.core.view.progress.steps
        if not self._is_rotten:
            require(
                steps >= self._durable_steps,
                f"{self._durable_steps} steps were durable, {steps} are left",
            )
        self._durable_steps = steps

    def _end_life(self, *, power: bool) -> None:
        coordinator, self.coordinator = self.coordinator, None
        self.disk.crash(power=power)
        if coordinator is not None:
            coordinator.gate.vanish()
            for line in coordinator.lines:
                if line.is_open_at_node and not power:
                    line.to_node(line.machine.reset)
        if "rot" in self.scenario.faults and self._rng.random() < 0.3:
            self._rot()
        self.at(self.now + self._rng.uniform(0, self.scenario.starting_seconds), self._start)

    def _rot(self) -> None:
        checkpoints = [name for name in self.disk.names("checkpoints") if name.startswith("step-")]
        # Of a single checkpoint there is nothing to fall back to, which is no bug.
        if len(checkpoints) > 1:
            self._note(f"rots: {self.disk.rot(f'checkpoints/{checkpoints[-1]}')}")
            self._is_rotten = True

    def remember(self, name: str, update: Update, arriving: Arriving) -> None:
        if len(self._answers) < ANSWERS_REMEMBERED:
            self._answers.append((name, update, arriving))

    def told(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        """The core was told something: for the trace, and for what it says is durable."""
        self._durable_steps = max(self._durable_steps, self.latest_progress())
        self._was_aside |= any(isinstance(effect, ev.SetAside) for effect in effects)
        if effects or not isinstance(event, ev.Ticked):
            self._note(brief(event), effects)

    def latest_progress(self) -> int:
        return self.coordinator.core.view.progress.durable_steps if self.coordinator is not None else 0

    # --- faults -----------------------------------------------------------------------------------

    def _strike(self, blow: Blow) -> None:
        self._note(f"{blow.kind} n{blow.node} for {blow.seconds:.3f} s")
        machine = self.machines[blow.node]
        match blow.kind:
            case "crash":
                machine.crash()
                self.at(self.now + blow.seconds, machine.boot)
            case "cut":
                machine.cut()
            case "freeze":
                machine.freeze(blow.seconds)
            case "partition":
                machine.cut_off_until = max(machine.cut_off_until, self.now + blow.seconds)
            case "exodus":
                for each in self.machines:
                    each.crash()
                    self.at(self.now + blow.seconds, each.boot)
            case "full" | "broken":
                self.disk.trouble = blow.kind
                self.at(self.now + blow.seconds, self._heal_disk)
            case "pause" if self.coordinator is not None:
                self.coordinator.gate.shut(blow.seconds)
            case "stop" if self.coordinator is not None:
                # Every other run is told to end in a hurry.
                hurries = bool(self.scenario.seed % 2)
                self.coordinator.gate.enter(self.coordinator.tell, ev.Stop("it is enough", hurries=hurries))

    def _heal_disk(self) -> None:
        self.disk.trouble = ""

    def failure_chance(self, machine: Machine) -> float:
        """How likely a batch fails there."""
        if self._is_calm:
            return 0.0
        is_broken = "broken" in self.scenario.faults and machine is self.machines[-1]
        return 1.0 if is_broken else self.scenario.failure_chance

    def lie(self, machine: Machine) -> float:
        """How large a lie that machine tells now; 0: it is honest."""
        is_liar = "liar" in self.scenario.faults and machine is self.machines[0]
        if not is_liar or self._is_calm or self._rng.random() < 0.7:
            return 0.0
        if self.scenario.verify == 1.0:
            return self._rng.choice((math.inf, 1.0))  # it looks like any other
        # The first as well: then the coordinator's own gradient, or another node, decides.
        return self._rng.choice((math.inf, 1e6))

    def is_unreadable(self, key: tuple[int, int]) -> bool:
        """Whether the data set fails on this batch now."""
        return not self._is_calm and self.scenario.is_unreadable(*key)

    def damages(self, machine: Machine) -> bool:
        """Whether the replica of that machine suffers now: one node's again and again, others' seldom."""
        if DAMAGE not in self.scenario.faults or self._is_calm:
            return False
        return self._rng.random() < (0.3 if machine is self.machines[0] else 0.05)

    def spoils(self, step: int) -> bool:
        """Whether the learner cannot make this step, the first time it tries."""
        if "spoiled" not in self.scenario.faults or step in self._spoiled or self._rng.random() < 0.9:
            return False
        self._spoiled.add(step)
        return True

    def _calm(self) -> None:
        """No more faults; one node at least is there."""
        self._note("calm")
        self._is_calm = True
        self._heal_disk()
        if not any(
            machine.is_alive and self.scenario.can_hold(machine.name, BATCHES_MAX)
            for machine in self.machines
        ):
            self.machines[0].boot()
        # Nodes that were turned out meanwhile do not come back by themselves.
        self.at(self.now + 1.0, self._calm)

    # --- the trace --------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        self._note(text)

    def _note(self, text: str, effects: list[ev.Effect] | tuple[()] = ()) -> None:
        line = f"{self.now:10.4f}  {text}"
        if effects:
            line = f"{line:40} → " + "; ".join(map(brief, effects))
        self._fingerprint = zlib.crc32(line.encode(), self._fingerprint)
        if self._say is not None:
            self._say(line)


def brief(what: ev.Event | ev.Effect) -> str:
    """An event or an effect in a few words; lease numbers without their incarnation."""

    def short(lease: int) -> int:
        return lease & ((1 << INCARNATION_SHIFT) - 1)

    match what:
        case ev.Assign():
            lent = [f"#{short(x.id)} step {x.step.index} {x.span.start}–{x.span.stop}" for x in what.leases]
            return f"lend {what.node} {', '.join(lent)} v{what.leases[0].version}"
        case ev.CancelLeases():
            return f"cancel {what.node} {', '.join(f'#{short(lease)}' for lease in what.leases)}"
        case ev.Expire():
            return f"expire {what.node} {', '.join(f'#{short(lease)}' for lease in what.leases)}"
        case ev.Reject():
            return f"reject {what.node} #{short(what.lease)} ({what.reason})"
        case ev.Fold():
            return f"fold #{short(what.lease.id)}"
        case ev.SetAside():
            return f"set aside {what.span.start}–{what.span.stop} of step {what.plan.index}"
        case ev.Save():
            return f"save v{what.cut.version}"
        case ev.Step():
            return f"step {what.plan.index} v{what.version}"
        case ev.Note():
            return what.text
        case ev.Answered():
            return f"answered {what.node} {' '.join(f'#{short(lease)}' for lease in what.leases)}"
        case ev.Failed() | ev.Dropped() | ev.Unreadable():
            return f"{type(what).__name__.lower()} {what.node} #{short(what.lease)}"
        case ev.KeepMeasures():
            return f"keep #{short(what.lease.id)}"
        case ev.Measured():
            return f"measured {what.node} #{short(what.lease)}"
    return str(what)
