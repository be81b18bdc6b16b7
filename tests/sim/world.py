"""The simulated world: virtual time, a network of lines, and the coordinator's body around the real core.

A heap of (time, what happens). One seed decides everything, so any failure can be replayed. Mirrors
`runtime/coordinator.py` without sockets, tensors and clocks; what is lent, admitted or given up is the
core's to say.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.books import Books, Sum
from tests.sim.machine import Answer, Gate, Line, Machine, Params, Work
from tests.sim.scenario import Blow, Scenario
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore, CoreSettings
from w5xde.control.leases import INCARNATION_SHIFT, Lease
from w5xde.control.members import BEAT_SECONDS
from w5xde.control.plan import Plan

# A run that needs more than this has lost its way: most seeds need a few hundred, the longest some 20,000.
EVENTS_MAX = 200_000


class Failure(AssertionError):
    """A seed found something; says which, and how to see it again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a simulated run went."""

    reason: str
    error: str
    seconds: float
    events: int
    steps: int
    fingerprint: int


class World:
    """One run, from the first connection to the last effect."""

    def __init__(self, scenario: Scenario, say: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.now = 0.0
        # Whatever happens at the coordinator waits while it stands still.
        self.desk = Gate(self)
        plan = Plan(
            step_batches=scenario.step_batches,
            epoch_limit=scenario.epoch_limit,
            step_limit=scenario.step_limit,
            samples=None if scenario.is_stream else sum(scenario.epochs[0]),
            batch_size=scenario.batch_size,
        )
        settings = CoreSettings(scenario.mode, scenario.staleness, scenario.seconds_limit)
        self.core = CoordinatorCore(plan, settings)
        self.books = Books(self.core, scenario)
        self.machines = [Machine(self, f"n{i}", seconds) for i, seconds in enumerate(scenario.nodes)]
        self._say = say
        self._rng = random.Random(f"{scenario.seed} world")
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._peers: dict[str, Line] = {}
        self._incoming: dict[int, Sum] = {}
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        self._learner_free_at = 0.0
        self._beat_at = 0.0
        self._is_calm = False
        self._finish: ev.Finish | None = None
        self._count = 0
        self._fingerprint = 0
        self._perform: dict[type, Callable[[Any], None]] = {
            ev.Assign: self._assign,
            ev.Cancel: self._cancel,
            ev.Reject: self._reject,
            ev.Fold: self._fold,
            ev.Step: self._step,
            ev.Close: self._close,
            ev.Note: lambda effect: None,
            ev.Finish: self._finished,
        }
        self._prepare()

    # --- time -------------------------------------------------------------------------------------

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._order), act, args))

    def delay(self) -> float:
        return self._rng.uniform(0.5, 1.0) * self.scenario.delay_seconds

    def run(self) -> Outcome:
        """Until the core says Finish; raises Failure, with the seed, if anything is not as it must be."""
        try:
            self.run_until(math.inf)
            if self.core.handle(ev.Ticked(), self.now):
                raise AssertionError("a finished run still wants something")
        except Exception as error:
            seed = self.scenario.seed
            raise Failure(
                f"seed {seed}, at {self.now:.3f} s: {type(error).__name__}: {error}\n"
                f"replay: python -m tests.sim --seed {seed} --verbose"
            ) from error
        finish = self._finish or ev.Finish("never")
        steps = self.core.progress.steps
        return Outcome(finish.reason, finish.error, self.now, self._count, steps, self._fingerprint)

    def run_until(self, time: float) -> None:
        """Let everything happen that happens before `time`, or before the end."""
        while self._finish is None and (not self._heap or self._heap[0][0] < time):
            self._advance()

    def _prepare(self) -> None:
        scenario = self.scenario
        joins_at = scenario.joins_at or (0.0,) * len(self.machines)
        for machine, time in zip(self.machines, joins_at, strict=True):
            self.at(time, machine.boot)
        for blow in scenario.blows:
            self.at(blow.at, self._strike, blow)
        self.at(scenario.quiet_at, self._calm)
        self.at(scenario.tick_seconds, self.desk.enter, self._tick)
        if scenario.is_stream:
            self._discover(0, 0)

    def _advance(self) -> None:
        if not self._heap or self._heap[0][0] > self.scenario.deadline:
            raise AssertionError(f"not finished although all was calm since {self.scenario.quiet_at:.1f} s")
        self._count += 1
        if self._count > EVENTS_MAX:
            raise AssertionError(f"not finished after {EVENTS_MAX} events")
        self.now, _, act, args = heapq.heappop(self._heap)
        act(*args)

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
            case "exodus":
                for each in self.machines:
                    each.crash()
                    self.at(self.now + blow.seconds, each.boot)
            case "pause":
                self.desk.shut(blow.seconds)
            case "stop":
                self.desk.enter(self._tell, ev.Stop("it is enough"))

    def failure_chance(self, machine: Machine) -> float:
        """How likely a batch fails there."""
        if self._is_calm:
            return 0.0
        is_broken = "broken" in self.scenario.faults and machine is self.machines[-1]
        return 1.0 if is_broken else self.scenario.failure_chance

    def _calm(self) -> None:
        """No more faults; one node at least is there."""
        self._note("calm")
        self._is_calm = True
        if not any(machine.is_alive for machine in self.machines):
            self.machines[0].boot()
        # Nodes that were turned out meanwhile do not come back by themselves.
        self.at(self.now + 1.0, self._calm)

    # --- the coordinator's body -------------------------------------------------------------------

    def _tell(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        while self._events and self._finish is None:
            event = self._events.popleft()
            effects = self.core.handle(event, self.now)
            if effects or not isinstance(event, ev.Ticked):
                self._note(brief(event), effects)
            self.books.handled(event, effects, self.now)
            for effect in effects:
                self._perform[type(effect)](effect)
        self._is_dispatching = False

    def _tick(self) -> None:
        self.at(self.now + self.scenario.tick_seconds, self.desk.enter, self._tick)
        self._tell(ev.Ticked())
        if self.now >= self._beat_at:
            self._beat_at = self.now + BEAT_SECONDS
            for line in self._peers.values():
                line.to_node(line.machine.heard)

    def _discover(self, epoch: int, batch: int) -> None:
        """The stream gives its next batch, or says that the epoch is over."""
        if epoch == len(self.scenario.epochs):
            return
        sizes = self.scenario.epochs[epoch]
        is_over = batch == len(sizes)
        self._tell(ev.Discovered(epoch, 0 if is_over else sizes[batch]))
        soon = self.now + self._rng.uniform(0, self.scenario.reading_seconds)
        self.at(soon, self.desk.enter, self._discover, *((epoch + 1, 0) if is_over else (epoch, batch + 1)))

    # --- what nodes say ---------------------------------------------------------------------------

    def greeted(self, line: Line, name: str) -> None:
        wanted = line.name = name.partition("-")[0]
        for number in itertools.count(2):
            if line.name not in self._peers:
                break
            line.name = f"{wanted}-{number}"
        self._peers[line.name] = line
        line.to_node(line.machine.welcomed, line.name)

    def readied(self, line: Line) -> None:
        if line.is_open_at_desk:
            line.is_ready = True
            self._tell(ev.Joined(line.name))

    def beaten(self, line: Line) -> None:
        if line.is_open_at_desk and line.is_ready:
            self._heard(line)

    def lost(self, line: Line, reason: str) -> None:
        if line.is_open_at_desk:
            line.is_open_at_desk = False
            self._peers.pop(line.name, None)
            if line.is_ready:
                self._tell(ev.Left(line.name, reason))

    def _heard(self, line: Line) -> None:
        self.core.members.heard(line.name, self.now)
        self.books.heard(line.name, self.now)

    def updated(self, line: Line, answers: list[Answer]) -> None:
        if not line.is_open_at_desk:
            if "ghost" in self.scenario.faults:
                for answer in answers:
                    self._answered(line.name, answer, 0.001)
            return
        self._heard(line)
        leases, batches, sent_at = line.works.popleft()
        if leases != [answer.lease for answer in answers]:
            raise AssertionError(f"{line.name} answers {answers}, but was lent {leases}")
        batch_seconds = max(1e-9, (self.now - max(sent_at, line.answered_at)) / batches)
        line.answered_at = self.now
        for answer in answers:
            self._disturb(line.name, answer)
            self._answered(line.name, answer, batch_seconds)

    def _disturb(self, name: str, answer: Answer) -> None:
        if "impostor" in self.scenario.faults and self._rng.random() < 0.05:
            other = self._rng.choice(self.machines).name
            if other != name:
                self._answered(other, Answer(answer.lease, ("forged",)), 0.001)
        if "echo" in self.scenario.faults and self._rng.random() < 0.1:
            again = self.now + self._rng.choice((0.0, 0.01, 1.0, 10.0))
            self.at(again, self.desk.enter, self._answered, name, answer, 0.001)

    def _answered(self, name: str, answer: Answer, batch_seconds: float) -> None:
        if answer.failure:
            self._tell(ev.Failed(name, answer.lease, answer.failure))
        elif answer.total is None:
            self._tell(ev.Dropped(name, answer.lease))
        else:
            self._incoming[answer.lease] = answer.total
            self._tell(ev.Answered(name, answer.lease, batch_seconds))

    # --- what the core wants ----------------------------------------------------------------------

    def _assign(self, effect: ev.Assign) -> None:
        line = self._peers.get(effect.node)
        if line is None:
            raise AssertionError(f"{effect} to a node without a connection")
        reading = self._rng.uniform(0, self.scenario.reading_seconds)
        if reading:
            self.at(self.now + reading, self.desk.enter, self._send, line, effect.leases)
        else:
            self._send(line, effect.leases)

    def _send(self, line: Line, leases: list[Lease]) -> None:
        wanted = [lease for lease in leases if self.core.leases.holds(lease.id)]
        for lease in leases:
            if lease not in wanted:
                self._tell(ev.Dropped(line.name, lease.id))
        if not wanted or not line.is_open_at_desk:
            return
        if line.version is None or line.version < wanted[0].version:
            line.version = self.core.version
            line.to_node(line.machine.given, Params(line.version))
        line.works.append(
            ([lease.id for lease in wanted], sum(lease.span.count for lease in wanted), self.now)
        )
        line.to_node(line.machine.given, Work(wanted))

    def _cancel(self, effect: ev.Cancel) -> None:
        line = self._peers.get(effect.node)
        if line is not None:
            line.to_node(line.machine.cancelled, effect.leases)

    def _reject(self, effect: ev.Reject) -> None:
        self._incoming.pop(effect.lease, None)
        line = self._peers.get(effect.node)
        if line is not None:
            line.to_node(line.machine.heard)

    def _fold(self, effect: ev.Fold) -> None:
        self.books.folded(effect.lease, self._incoming.pop(effect.lease.id))

    def _step(self, effect: ev.Step) -> None:
        self.books.applied(effect, self.now)
        seconds = self._rng.uniform(0, self.scenario.learner_seconds)
        if not seconds:
            self._tell(ev.Stepped(effect.plan.index))
            return
        self._learner_free_at = max(self.now, self._learner_free_at) + seconds
        self.at(self._learner_free_at, self.desk.enter, self._tell, ev.Stepped(effect.plan.index))

    def _close(self, effect: ev.Close) -> None:
        line = self._peers.pop(effect.node)
        line.is_open_at_desk = False
        if effect.reason.startswith("silent"):
            line.to_node(line.machine.reset)
        else:
            line.to_node(line.machine.parted, effect.reason)

    def _finished(self, effect: ev.Finish) -> None:
        self._finish = effect

    # --- the trace --------------------------------------------------------------------------------

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
        case ev.Cancel():
            return f"cancel {what.node} {', '.join(f'#{short(lease)}' for lease in what.leases)}"
        case ev.Reject():
            return f"reject {what.node} #{short(what.lease)} ({what.reason})"
        case ev.Fold():
            return f"fold #{short(what.lease.id)}"
        case ev.Step():
            return f"step {what.plan.index} v{what.version}"
        case ev.Note():
            return what.text
        case ev.Answered() | ev.Failed() | ev.Dropped():
            return f"{type(what).__name__.lower()} {what.node} #{short(what.lease)}"
    return str(what)
