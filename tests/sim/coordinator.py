"""One life of the simulated coordinator: the real core, the real update pipeline and the real journal.

Fills the ports of the pipeline with fakes (`tests/sim/fakes.py`) on virtual time, a virtual network and a
virtual disk. It may die at any operation; the next life then starts from what is on the disk.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from tests.sim.books import Books, batches_in, require
from tests.sim.counter import Counter, Sum
from tests.sim.fakes import (
    Arriving,
    CountingLearner,
    FakeBatches,
    FakeParameters,
    FakeReader,
    FakeRecheck,
    FakeTasks,
    Released,
    WatchedSums,
    Writer,
    tupled,
)
from tests.sim.machine import Gate, Line, Machine
from tests.sim.rounds import CountedRounds
from tests.sim.validation import FakeValidation
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.pool.members import BEAT_SECONDS
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.messages import Beat, Bye, Update
from w5xde.runtime.coordinator.opening import first_records
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger import Ledger
from w5xde.runtime.durable.resume import Restored, restore
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.pipeline import Pipeline
from w5xde.runtime.pipeline.ports import ModelPorts, Ports
from w5xde.runtime.pipeline.steps import Applied
from w5xde.runtime.pipeline.updates import REPLICAS_LOST_MAX
from w5xde.runtime.telemetry.meters import Meters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.world import World

# Segments of a few records each, so that most runs close and compress some.
SEGMENT_BYTES = 4000
# A batch is read, and the learner has time for its parameters, within this many ticks.
UNSENT_TICKS_MAX = 50
# At most this many large updates may arrive at a time.
BUDGET_UPDATES = 2.5


class WatchedCore(CoordinatorCore):
    """The real core; the books see every event and its effects before these are performed."""

    watch: Callable[[ev.Event, list[ev.Effect]], None]

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        effects = super().handle(event, now)
        self.watch(event, effects)
        return effects


class WatchedPipeline(Pipeline):
    """The real pipeline; the coordinator may die before each effect."""

    about_to: Callable[[ev.Effect], None]

    def perform(self, effect: ev.Effect) -> None:
        self.about_to(effect)
        super().perform(effect)


class Caller:
    """The loop of a pool's user: calls, waits, gives up now and then, and changes its weights in between."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self._coordinator = coordinator
        self._rng = random.Random(f"{coordinator.world.scenario.seed} caller")
        self._waits_for: int | None = None
        # A number for the weights as they are, and the versions since which their parts are so.
        self.weights = self.moved_at = self.fixed_at = 0

    def call(self, epoch: int) -> None:
        coordinator, scenario = self._coordinator, self._coordinator.world.scenario
        if epoch == len(scenario.epochs):
            return
        if self._rng.random() < 0.7:
            self.weights += 1
            self.moved_at = coordinator.counter.version
            if self._rng.random() < 0.3:
                self.fixed_at = self.moved_at
        self._waits_for = epoch
        coordinator.books.weights[epoch] = self.weights
        coordinator.tell(ev.Called(epoch, list(scenario.epochs[epoch])))
        if self._rng.random() < 0.3:
            usual = len(scenario.epochs[epoch]) * max(scenario.nodes)
            coordinator.later(self._rng.uniform(0, usual), self._give_up, epoch)

    def _give_up(self, epoch: int) -> None:
        if self._waits_for == epoch:
            self._coordinator.tell(ev.Withdrawn(epoch, "its caller gave it up"))

    def hears(self, epoch: int) -> None:
        """A call has ended, in whatever way: go on, after a while or at once."""
        require(self._waits_for == epoch, f"call {epoch} ends, and {self._waits_for} was waited for")
        self._waits_for = None
        self._coordinator.later(self._rng.choice((0.0, 0.01, 0.3)), self.call, epoch + 1)


class SimulatedCoordinator:
    """One life, from what is on the disk to its end. `past` is the last life before that got to work."""

    def __init__(self, world: World, past: SimulatedCoordinator | None, *, is_resumed: bool) -> None:
        scenario = self._scenario = world.scenario
        self.world = world
        self.rng = random.Random(f"{scenario.seed} coordinator {world.lives}")
        self.gate = Gate(world)
        self.counter = Counter(scenario)
        self.rounds = CountedRounds(self.counter)
        self.journal = Journal(
            Ledger(world.disk, lambda: world.now, SEGMENT_BYTES),
            self.counter.capture,
            keep=3,
            logs_steps=scenario.durability == "step",
        )
        self.restored: Restored | None = None
        if is_resumed:
            self.restored = restore(self.journal, self._load, self._replay, "run")
        self.core = self._make_core()
        self.books = Books(
            self.core, scenario, self.counter, past.books if past is not None else None, world.now
        )
        self.core.watch = self._decided
        self.finished: ev.Finish | None = None
        self.lines: list[Line] = []
        self._peers: dict[str, Line] = {}
        self._heard: dict[str, float] = {}
        self._uploads: dict[Line, Arriving] = {}
        # Steps that the core decided, by the version they start from.
        self.decided: dict[int, ev.Step] = {}
        self._beat_at = 0.0
        self._ticks = 0
        # Leases and the tick at which they were assigned.
        self._assigned: dict[int, int] = {}
        # Leases whose answers have arrived.
        self._received: set[int] = set()
        self.released = Released()
        self.caller = Caller(self) if scenario.is_pool else None
        self.validation = FakeValidation(self)
        learner = CountingLearner(self)
        self._tasks = FakeTasks(self, learner)
        parameters = FakeParameters(self, learner)
        model = ModelPorts(learner, WatchedSums(is_pool=scenario.is_pool), FakeReader(scenario), parameters)
        ports = Ports(
            clock=lambda: world.now,
            tasks=self._tasks,
            peers=self,
            batches=FakeBatches(self),
            model=cast(ModelPorts, model),
            verifier=FakeRecheck(self),
            validation=self.validation,
        )
        self._meters = Meters()
        budget_bytes = BUDGET_UPDATES * scenario.vector_bytes
        self._pipeline = WatchedPipeline(self.core, self.journal, ports, self._meters, self, budget_bytes)
        self._pipeline.about_to = self._about_to
        records = first_records(
            "run", self.journal.life, scenario.mode, scenario.durability, self.core, self.restored
        )
        last = self.restored.last if self.restored is not None else None
        self.journal.begin(records, self.core.view.version, last)
        self._writer = Writer(self)
        self.journal.start(self._tasks, self._writer, self.tell, world.say)
        world.at(world.now + scenario.tick_seconds, self.gate.enter, self._tick)
        if self.caller is not None:
            self.caller.call(0)
        elif scenario.is_stream:
            self._discover(self.core.view.plan.cursor.epoch, self.core.view.plan.cursor.first)

    def _make_core(self) -> WatchedCore:
        scenario = self._scenario
        plan = Plan(
            step_batches=scenario.step_batches,
            epoch_limit=scenario.epoch_limit,
            step_limit=scenario.step_limit,
            samples=None if scenario.is_stream else sum(scenario.epochs[0]),
            batch_size=scenario.batch_size,
            rounds=scenario.round_lengths,
        )
        settings = CoreSettings(
            scenario.mode,
            scenario.staleness,
            scenario.seconds_limit,
            incarnation=self.journal.life,
            skip_bad_batches=scenario.skip_bad_batches,
            all_or_nothing=scenario.is_pool,
            save_seconds=scenario.save_seconds,
            save_steps=scenario.save_steps,
            logs_steps=self.journal.steps is not None,
            max_update_norm=scenario.max_update_norm,
            # Honest norms are about 1.
            own_norm=1.0,
            own_step_norm=1.0,
            verify=scenario.verify,
            is_large=scenario.is_large and not scenario.is_rounds,
            delay_correction=scenario.mode == "async",
            looks_ahead=scenario.mode == "async",
            stretches=scenario.stretches,
            robust=scenario.rule,
            evaluates=bool(scenario.validation),
            evaluate_every=scenario.evaluate_every,
            evaluation_policy=scenario.evaluation_policy,
            validation_sizes=scenario.validation,
        )
        cut = self.restored.cut if self.restored is not None else None
        chance = random.Random(f"{scenario.seed} verify {self.world.lives}")
        return WatchedCore(plan, settings, cut, chance)

    def _load(self, files: Mapping[str, bytes], life: int) -> None:
        self.counter.load(files)
        self.rounds.restored()

    def _replay(self, step: ev.Step, record: dict[str, Any], body: bytes) -> None:
        self.apply(step, tupled(json.loads(body)))

    def apply(self, step: ev.Step, total: Sum) -> None:
        self.counter.apply(step, total)
        if self._scenario.is_rounds:
            self.rounds.advanced(str(total))

    # --- decide, then do --------------------------------------------------------------------------

    def tell(self, event: ev.Event) -> None:
        if self.finished is None:
            self._pipeline.dispatch(event)

    def _decided(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        self.world.told(event, effects)
        self.books.handled(event, effects, self.world.now)

    def _about_to(self, effect: ev.Effect) -> None:
        self.world.point(type(effect).__name__)
        if isinstance(effect, ev.Step):
            self.decided[effect.version] = effect
        elif isinstance(effect, ev.Assign):
            self._assigned.update(dict.fromkeys([lease.id for lease in effect.leases], self._ticks))
            if effect.leases[0].step.validates:
                self.validation.began(effect.leases[0])
        elif isinstance(effect, ev.SetAside):
            leaves = range(effect.span.start, effect.span.stop)
            keys = [(effect.plan.epoch, batch) for leaf in leaves for batch in batches_in(effect.plan, leaf)]
            self.released.may_release(keys)

    def later(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self.world.at(self.world.now + seconds, self.gate.enter, act, *args)

    def _tick(self) -> None:
        self.later(self._scenario.tick_seconds, self._tick)
        heard, self._heard = self._heard, {}
        self.tell(ev.Ticked("shared", self.rng.random(), heard))
        if self.finished is not None:
            return
        for peer in self._pipeline.updates.tick(self.world.now):
            self._hear(peer.name)
        self._ticks += 1
        self._require_all_sent()
        self.journal.tick(self.world.now)
        if self.world.now >= self._beat_at:
            self._beat_at = self.world.now + BEAT_SECONDS
            for line in self._peers.values():
                line.send(Beat())

    def _require_all_sent(self) -> None:
        """A lease that a node is said to hold was sent to it, or will be soon."""
        # After the end the core takes no notice of nodes that leave.
        for member in self.core.view.members if not self.books.is_over else ():
            sent = {lease for work in self._peers[member.name].peer.works for lease in work.leases}
            for lease in member.pending:
                is_new = self._ticks - self._assigned[lease] < UNSENT_TICKS_MAX
                # An answer may wait for the learner, or to be verified.
                require(lease in sent or lease in self._received or is_new, f"lease {lease} was never sent")

    def _discover(self, epoch: int, batch: int) -> None:
        """The stream gives its next batch, or says that the epoch is over."""
        if epoch == len(self._scenario.epochs):
            return
        sizes = self._scenario.epochs[epoch]
        is_over = batch == len(sizes)
        self.tell(ev.Discovered(epoch, [0 if is_over else sizes[batch]]))
        reading = self.rng.uniform(0, self._scenario.reading_seconds)
        self.later(reading, self._discover, *((epoch + 1, 0) if is_over else (epoch, batch + 1)))

    # --- the table of peers, for the pipeline -----------------------------------------------------

    def get(self, name: str) -> Peer | None:
        line = self._peers.get(name)
        return line.peer if line is not None else None

    def __iter__(self) -> Iterator[Peer]:
        return iter([line.peer for line in self._peers.values()])

    def allow_vectors(self, peer: Peer, count: int) -> None:
        peer.frame_vectors = max(peer.frame_vectors, count)

    def evict(self, peer: Peer, reason: str, *, abruptly: bool = False) -> None:
        line = cast(Line, peer.connection)
        losses = line.machine.replica.losses
        is_hopeless = reason.startswith("its parameters differ") and losses > REPLICAS_LOST_MAX
        require(is_hopeless, f"{peer.name} is evicted: {reason} ({losses} times)")
        line.to_node(line.machine.reset)
        self.lost(line, reason)

    def note_replica(self, peer: Peer) -> None:
        self.world.say(f"{peer.name} lost its replica")

    # --- what nodes say ---------------------------------------------------------------------------

    def connect(self, machine: Machine) -> Line:
        line = Line(self.world, machine, self)
        line.peer = Peer(line, cast(Any, None))
        self.lines.append(line)
        return line

    def greeted(self, line: Line, name: str) -> None:
        wanted = name.partition("-")[0]
        names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
        line.peer.name = next(name for name in names if name not in self._peers)
        self._peers[line.peer.name] = line
        line.to_node(line.machine.welcomed, line.peer.name)

    def readied(self, line: Line, replica: tuple[int, bytes]) -> None:
        if not line.is_open_here:
            return
        peer = line.peer
        peer.is_ready = True
        peer.replica = replica
        slots = self._scenario.slots
        guess: float | None = line.machine.batch_seconds
        if self._scenario.faults:
            # By the time its canary took, a node may seem to have any speed.
            chance = random.Random(f"{self._scenario.seed} guess {peer.name}")
            guess = chance.choice((None, 1e-6, guess, 100.0))
        self.tell(ev.Joined(peer.name, "shared" if slots else "", slots, guess))

    def beaten(self, line: Line) -> None:
        if line.is_open_here and line.peer.is_ready:
            self._hear(line.peer.name)

    def _hear(self, name: str) -> None:
        self._heard[name] = self.world.now
        self.books.heard(name, self.world.now)

    def lost(self, line: Line, reason: str) -> None:
        if self._part(line) and line.peer.is_ready:
            self.tell(ev.Left(line.peer.name, reason))

    def _part(self, line: Line) -> bool:
        """Forget a connection; returns whether it was open."""
        if not line.is_open_here:
            return False
        line.is_open_here = False
        line.peer.is_gone = True
        self._peers.pop(line.peer.name, None)
        self._uploads.pop(line, None)
        self._pipeline.updates.lost(line.peer)
        return True

    # --- updates ----------------------------------------------------------------------------------

    def uploaded(self, line: Line, update: Update, arriving: Arriving) -> None:
        """The header of an update is here, and its body follows, if it may."""
        if not line.is_open_here:
            if "ghost" in self._scenario.faults:
                self.inject(line.peer.name, update, arriving)
            return
        self._hear(line.peer.name)
        if "impostor" in self._scenario.faults and self.rng.random() < 0.05:
            other = self.rng.choice(self.world.machines).name
            if other != line.peer.name:
                self.inject(other, update, arriving)
        self._uploads[line] = arriving
        if self._pipeline.updates.may_send(line.peer, update, len(arriving)):
            self.go_on(line)

    def go_on(self, line: Line) -> None:
        """A body may come now: it takes its time, and may never arrive."""
        arriving = self._uploads.get(line)
        if arriving is None:
            return
        arriving.has_begun = True
        begun = sum(each.has_begun for each in self._uploads.values() if each.is_large)
        require(begun <= BUDGET_UPDATES, f"{begun} large updates arrive at a time")
        seconds = self.rng.uniform(0, self._scenario.transfer_seconds) if arriving.is_large else 0.0
        if seconds:
            self.later(seconds, self._arrived, line, arriving)
        else:
            self._arrived(line, arriving)

    def _arrived(self, line: Line, arriving: Arriving) -> None:
        if self._uploads.get(line) is not arriving:
            return  # the connection is gone, and the rest of its body with it
        self._hear(line.peer.name)
        place = self._pipeline.updates.place(line.peer, len(arriving))
        if hasattr(place, "fill"):
            place.fill(arriving)
        del self._uploads[line]
        self._received.update(answer.lease for answer in arriving.update.answers)
        self.world.remember(line.peer.name, arriving.update, arriving)
        self._pipeline.updates.received(line.peer, arriving.update, cast(Any, arriving))
        if "echo" in self._scenario.faults and self.rng.random() < 0.1:
            again = self.rng.choice((0.0, 0.01, 1.0, 10.0))
            told = (line.peer.name, arriving.update, arriving)
            # Not before the core was told for the first time.
            self._tasks.call(lambda: None, lambda _: self.later(again, self.inject, *told))
        line.resume()

    def inject(self, name: str, update: Update, arriving: Arriving) -> None:
        """Tell the core of answers that it must refuse: from an earlier life of the coordinator, from a dead
        connection, or of a node that was not lent the batches."""
        norms = iter(arriving.norms)
        for answer in update.answers:
            if answer.dropped:
                self.tell(ev.Dropped(name, answer.lease))
            elif answer.failure:
                self.tell(ev.Failed(name, answer.lease, answer.failure))
            elif answer.metrics:
                self.tell(ev.Measured(name, answer.lease))
            else:
                self.tell(ev.Answered(name, [answer.lease], 0.001, norms=[next(norms)]))

    # --- what the core wants, and the pipeline does not do ----------------------------------------

    def close(self, effect: ev.Close) -> None:
        line = self._peers[effect.node]
        self._part(line)
        if effect.for_good:
            line.to_node(line.machine.receive, Bye(effect.reason, finished=False))
        else:
            line.to_node(line.machine.reset)

    def ban(self, effect: ev.Ban) -> None:
        """The books know whether a ban is just."""

    def evaluate(self, effect: ev.Evaluate) -> None:
        self.validation.measure_here(effect)

    def kept_facts(self) -> dict[str, Any]:
        return self._meters.kept()

    def note(self, effect: ev.Note) -> None:
        """The trace has it."""

    def given_up(self, effect: ev.SetAside) -> None:
        if self.caller is None:
            raise AssertionError(f"{effect} in a run")
        self.caller.hears(effect.plan.epoch)

    def stepped(self, applied: list[Applied]) -> None:
        for each in applied if self.caller is not None else ():
            self.caller.hears(each.step.plan.epoch)

    def learner_broke(self, error: BaseException) -> None:
        raise AssertionError(f"the learner broke: {type(error).__name__}: {error}") from error

    def finish(self, effect: ev.Finish) -> None:
        # What was decided is applied, and told, before the end is written.
        self._tasks.call(lambda: None, lambda _: self._conclude(effect))

    def _conclude(self, effect: ev.Finish) -> None:
        # As the coordinator does: nothing else writes when the end is written.
        self._writer.drain()
        cut = self.core.view.cut(self.world.now)
        self.journal.save_last(cut, {"meters": {}})
        self.journal.stop({"kind": "stop", "reason": effect.reason, "error": effect.error})
        self.finished = effect
