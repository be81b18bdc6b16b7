"""The desk: one life of the simulated coordinator. The real core and the real keeper, on a virtual disk.

Mirrors `runtime/coordinator/body.py` without sockets, tensors and clocks; what is lent, admitted, given up or
kept is decided by the very code that does so in earnest. It dies at any operation, and another takes over.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.books import Books, require
from tests.sim.counter import LIE, Counter, Sum
from tests.sim.machine import Answer, Gate, Line, Machine, Params, Work
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan
from w5xde.runtime.coordinator.setup import first_records
from w5xde.runtime.durable.journal import Keeper
from w5xde.runtime.durable.resume import Restored, restore
from w5xde.tree import PairwiseTree, Span

if TYPE_CHECKING:
    from tests.sim.world import World


class Desk:
    """One life, from what is on the disk to its end. `past` is the one before that got to work."""

    def __init__(self, world: World, past: Desk | None, *, is_resumed: bool) -> None:
        scenario = self._scenario = world.scenario
        self._world = world
        self._rng = random.Random(f"{scenario.seed} desk {world.lives}")
        self.gate = Gate(world)
        self.counter = Counter(scenario)
        self.keeper = Keeper(
            world.disk,
            self.counter.capture,
            lambda: world.now,
            keep=3,
            logs_steps=scenario.durability == "step",
        )
        self.restored: Restored | None = None
        if is_resumed:
            self.restored = restore(world.disk, self.keeper.store, self.counter.load, self._replay, "run")
        plan = Plan(
            step_batches=scenario.step_batches,
            epoch_limit=scenario.epoch_limit,
            step_limit=scenario.step_limit,
            samples=None if scenario.is_stream else sum(scenario.epochs[0]),
            batch_size=scenario.batch_size,
        )
        settings = CoreSettings(
            scenario.mode,
            scenario.staleness,
            scenario.seconds_limit,
            incarnation=self.keeper.life,
            skip_bad_batches=scenario.skip_bad_batches,
            save_seconds=scenario.save_seconds,
            save_steps=scenario.save_steps,
            logs_steps=self.keeper.steps is not None,
            max_update_norm=scenario.max_update_norm,
            # Honest norms are about 1.
            own_norm=1.0,
            verify=scenario.verify,
            stretches=scenario.stretches,
            robust=scenario.rule,
        )
        cut = self.restored.cut if self.restored is not None else None
        self.core = CoordinatorCore(
            plan, settings, cut, random.Random(f"{scenario.seed} verify {world.lives}")
        )
        self.books = Books(
            self.core, scenario, self.counter, past.books if past is not None else None, world.now
        )
        self.finish: ev.Finish | None = None
        self.lines: list[Line] = []
        self._peers: dict[str, Line] = {}
        self._incoming: dict[tuple[str, int], Sum] = {}
        self._trees: dict[int, PairwiseTree[Sum | None]] = {}
        self._events: deque[ev.Event] = deque()
        self._is_dispatching = False
        self._learner_free_at = 0.0
        self._beat_at = 0.0
        self._perform: dict[type, Callable[[Any], None]] = {
            ev.Assign: self._assign,
            ev.Verify: self._verify,
            ev.Cancel: self._cancel,
            ev.Expire: lambda effect: None,
            ev.Reject: self._reject,
            ev.Fold: self._fold,
            ev.SetAside: self._set_aside,
            ev.Step: self._step,
            ev.Reopen: self._reopen,
            ev.Save: lambda effect: self.keeper.save(effect.cut, {"meters": {}}, world.now),
            ev.Close: self._close,
            ev.Ban: lambda effect: None,
            ev.Note: lambda effect: None,
            ev.Finish: self._finished,
        }
        records = first_records(
            "run", self.keeper.life, scenario.mode, scenario.durability, self.core, self.restored
        )
        last = self.restored.last if self.restored is not None else None
        self.keeper.begin(records, self.core.version, last)
        self._writer = _Writer(self)
        self.keeper.start(_Learner(self), self._writer, self.tell, world.say)
        world.at(world.now + scenario.tick_seconds, self.gate.enter, self._tick)
        if scenario.is_stream:
            self._discover(plan.cursor.epoch, plan.cursor.first)

    def _replay(self, step: ev.Step, record: dict[str, Any], body: bytes) -> None:
        self.counter.apply(step, _tupled(json.loads(body)))

    # --- decide, then do --------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        self._events.append(event)
        if self._is_dispatching:
            return
        self._is_dispatching = True
        while self._events and self.finish is None:
            event = self._events.popleft()
            effects = self.core.handle(event, self._world.now)
            self._world.told(event, effects)
            self.books.handled(event, effects, self._world.now)
            self.keeper.saw(event, effects)
            for effect in effects:
                self._world.point(type(effect).__name__)
                self._perform[type(effect)](effect)
        self._is_dispatching = False

    def later(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self._world.at(self._world.now + seconds, self.gate.enter, act, *args)

    def _tick(self) -> None:
        self.later(self._scenario.tick_seconds, self._tick)
        self.tell(ev.Ticked("shared", self._rng.random()))
        if self.finish is not None:
            return
        self.keeper.tick(self._world.now)
        if self._world.now >= self._beat_at:
            self._beat_at = self._world.now + BEAT_SECONDS
            for line in self._peers.values():
                line.to_node(line.machine.heard)

    def _discover(self, epoch: int, batch: int) -> None:
        """The stream gives its next batch, or says that the epoch is over."""
        if epoch == len(self._scenario.epochs):
            return
        sizes = self._scenario.epochs[epoch]
        is_over = batch == len(sizes)
        self.tell(ev.Discovered(epoch, 0 if is_over else sizes[batch]))
        reading = self._rng.uniform(0, self._scenario.reading_seconds)
        self.later(reading, self._discover, *((epoch + 1, 0) if is_over else (epoch, batch + 1)))

    # --- what nodes say ---------------------------------------------------------------------------

    def connect(self, machine: Machine) -> Line:
        line = Line(self._world, machine, self)
        self.lines.append(line)
        return line

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
            slots = self._scenario.slots
            guess: float | None = line.machine.batch_seconds
            if self._scenario.faults:
                # What it seemed to take when it proved itself may be anything.
                chance = random.Random(f"{self._scenario.seed} guess {line.name}")
                guess = chance.choice((None, 1e-6, guess, 100.0))
            self.tell(ev.Joined(line.name, "shared" if slots else "", slots, guess))

    def beaten(self, line: Line) -> None:
        if line.is_open_at_desk and line.is_ready:
            self._heard(line)

    def lost(self, line: Line, reason: str) -> None:
        if line.is_open_at_desk:
            line.is_open_at_desk = False
            self._peers.pop(line.name, None)
            if line.is_ready:
                self.tell(ev.Left(line.name, reason))
                self._break_off()

    def _break_off(self) -> None:
        """Something of the node that is gone may have been added by half."""
        if "spoiled" in self._scenario.faults and self._rng.random() < 0.3:
            for work in self.core.mode.open_works:
                self.tell(ev.Spoilt(work.plan.index, "something was added by half"))

    def _heard(self, line: Line) -> None:
        self.core.members.heard(line.name, self._world.now)
        self.books.heard(line.name, self._world.now)

    def updated(self, line: Line, answers: list[Answer]) -> None:
        if not line.is_open_at_desk:
            if "ghost" in self._scenario.faults:
                for answer in answers:
                    self.answered(line.name, answer, 0.001)
            return
        self._heard(line)
        leases, batches, sent_at = line.works.popleft()
        if leases != [answer.lease for answer in answers]:
            raise AssertionError(f"{line.name} answers {answers}, but was lent {leases}")
        batch_seconds = max(1e-9, (self._world.now - max(sent_at, line.answered_at)) / batches)
        line.answered_at = self._world.now
        usable = [a for a in answers if not a.failure and a.total is not None and a.norm < math.inf]
        together = self.keeper.steps is None and len(usable) > 1
        for answer in answers:
            self._disturb(line.name, answer)
            if not together or answer not in usable:
                self.answered(line.name, answer, batch_seconds)
        if together:
            self._answered(line.name, usable, batch_seconds)

    def _disturb(self, name: str, answer: Answer) -> None:
        if "impostor" in self._scenario.faults and self._rng.random() < 0.05:
            other = self._rng.choice(self._world.machines).name
            if other != name:
                self.answered(other, Answer(answer.lease, ("forged",)), 0.001)
        if "echo" in self._scenario.faults and self._rng.random() < 0.1:
            again = self._rng.choice((0.0, 0.01, 1.0, 10.0))
            self.later(again, self.answered, name, answer, 0.001)

    def answered(self, name: str, answer: Answer, batch_seconds: float) -> None:
        if answer.failure:
            self.tell(ev.Failed(name, answer.lease, answer.failure))
        elif answer.norm == math.inf:
            self.tell(ev.Failed(name, answer.lease, "its gradient is not finite", math.inf))
        elif answer.total is None:
            self.tell(ev.Dropped(name, answer.lease))
        else:
            self._answered(name, [answer], batch_seconds)

    def _answered(self, name: str, answers: list[Answer], batch_seconds: float) -> None:
        for answer in answers:
            if answer.total is None:
                raise AssertionError(f"{answer} is no answer")
            self._world.remember(name, answer)
            self._incoming[name, answer.lease] = answer.total
        norms = [answer.norm for answer in answers]
        self.tell(ev.Answered(name, [answer.lease for answer in answers], batch_seconds, norms=norms))

    # --- what the core wants ----------------------------------------------------------------------

    def _assign(self, effect: ev.Assign) -> None:
        line = self._peers.get(effect.node)
        if line is None:
            raise AssertionError(f"{effect} to a node without a connection")
        reading = self._rng.uniform(0, self._scenario.reading_seconds)
        if reading:
            self.later(reading, self._send, line, effect.leases)
        else:
            self._send(line, effect.leases)

    def _send(self, line: Line, leases: list[Lease]) -> None:
        wanted = [lease for lease in leases if self.core.leases.holds(lease.id)]
        for lease in leases:
            if lease not in wanted:
                self.tell(ev.Dropped(line.name, lease.id))
        if not wanted or not line.is_open_at_desk:
            return
        if line.version is None or line.version < wanted[0].version:
            line.version = self.counter.version
            line.to_node(line.machine.given, Params(line.version))
        batches = sum(lease.span.count for lease in wanted)
        line.works.append(([lease.id for lease in wanted], batches, self._world.now))
        line.to_node(line.machine.given, Work(wanted))

    def _cancel(self, effect: ev.Cancel) -> None:
        line = self._peers.get(effect.node)
        if line is not None:
            line.to_node(line.machine.cancelled, effect.leases)

    def _verify(self, effect: ev.Verify) -> None:
        lease = effect.lease
        wrong = "it is a lie" if self._incoming[lease.node, lease.id] == LIE else ""
        seconds = self._rng.uniform(0, self._scenario.verifying_seconds)
        self.later(seconds, self.tell, ev.Verified(lease.node, lease.id, wrong))

    def _reject(self, effect: ev.Reject) -> None:
        self._incoming.pop((effect.node, effect.lease), None)
        line = self._peers.get(effect.node)
        if line is not None:
            line.to_node(line.machine.heard)

    def _fold(self, effect: ev.Fold) -> None:
        total = self._incoming.pop((effect.lease.node, effect.lease.id))
        require(total != LIE, f"a lie is folded: {effect}")
        self.books.folded(effect.lease)
        self._put(effect.lease.step.index, effect.lease.step.count, effect.lease.span, total)

    def _set_aside(self, effect: ev.SetAside) -> None:
        self._put(effect.plan.index, effect.plan.count, effect.span, None)

    def _put(self, step: int, count: int, span: Span, total: Sum | None) -> None:
        tree = self._trees.setdefault(step, PairwiseTree(count, _pair))
        tree.put(span, total)

    def _step(self, effect: ev.Step) -> None:
        plan = effect.plan
        total = self._trees.pop(plan.index).take(Span(0, plan.count))
        if total is None:
            raise AssertionError(f"nothing came for {plan}")
        if effect.version != self.counter.version:
            self._told_by_learner(ev.Undone(effect))
            return
        if self._world.spoils(plan.index):
            self._told_by_learner(ev.Undone(effect, f"step {plan.index} is spoiled"))
            return
        self.books.summed(effect, total)
        is_durable = False
        if self.keeper.steps is not None:
            cut = self.core.cut(self._world.now)
            body = json.dumps(total).encode()
            is_durable = self.keeper.log_step(effect, cut, body, [], 0.0)
            self._world.point("logged")
        self.counter.apply(effect, total)
        self.books.applied(effect, self._world.now)
        self._told_by_learner(ev.Stepped([plan.index], is_durable))

    def _told_by_learner(self, event: ev.Event) -> None:
        seconds = self._rng.uniform(0, self._scenario.learner_seconds)
        if not seconds:
            self.tell(event)
            return
        self._learner_free_at = max(self._world.now, self._learner_free_at) + seconds
        self._world.at(self._learner_free_at, self.gate.enter, self.tell, event)

    def _reopen(self, effect: ev.Reopen) -> None:
        self._trees.pop(effect.plan.index, None)
        for span in effect.empty:
            self._put(effect.plan.index, effect.plan.count, span, None)

    @property
    def learner_seconds(self) -> float:
        """How long the learner is still busy with what it was given."""
        return max(0.0, self._learner_free_at - self._world.now)

    def _close(self, effect: ev.Close) -> None:
        line = self._peers.pop(effect.node)
        line.is_open_at_desk = False
        if effect.for_good:
            line.to_node(line.machine.parted, effect.reason)
        else:
            line.to_node(line.machine.reset)

    def _finished(self, effect: ev.Finish) -> None:
        # What was decided is applied, and told, before the end is written.
        if self.learner_seconds:
            self.later(self.learner_seconds, self._conclude, effect)
        else:
            self._conclude(effect)

    def _conclude(self, effect: ev.Finish) -> None:
        # As the coordinator does: nothing else writes when the end is written.
        self._writer.drain()
        cut = self.core.cut(self._world.now)
        self.keeper.save_last(cut, {"meters": {}})
        self.keeper.stop({"kind": "stop", "reason": effect.reason, "error": effect.error})
        self.finish = effect


def _pair(left: Sum | None, right: Sum | None) -> Sum | None:
    return (left, right) if left is not None and right is not None else left or right


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


class _Learner:
    """Has done everything it was given before it makes a call, and tells of it after telling of those."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        result = function()
        if done is None:
            return
        if self._desk.learner_seconds:
            self._desk.later(self._desk.learner_seconds, done, result)
        else:
            done(result)


class _Writer:
    """A thread that waits for the disk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._free_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def drain(self) -> None:
        """Do now what is still to be done."""
        while self._waiting:
            self._waiting.popleft()()

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        world = self._desk._world
        seconds = self._desk._rng.uniform(0, world.scenario.writing_seconds)
        self._free_at = max(world.now, self._free_at) + seconds

        def act() -> None:
            result = function()
            if done is not None:
                done(result)

        def due() -> None:
            # Unless it was drained meanwhile.
            if self._waiting and self._waiting[0] is act:
                self._waiting.popleft()()

        self._waiting.append(act)
        world.at(self._free_at, self._desk.gate.enter, due)
