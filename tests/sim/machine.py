"""A machine: the body of one simulated node around the real NodeCore, and its line to the coordinator.

Computes as long as its speed says, dies, freezes, wakes up. Knows nothing of what the coordinator decides.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.sim.books import canonical, require
from tests.sim.counter import LIE, Sum
from w5xde.control import node as nd
from w5xde.control.steps.leases import Lease

if TYPE_CHECKING:
    from tests.sim.desk import Desk
    from tests.sim.world import World

# As `w5xde join --wait` gives by default.
WAIT_SECONDS = 30.0


class Params(NamedTuple):
    version: int


class Work(NamedTuple):
    leases: list[Lease]


class Answer(NamedTuple):
    """What a node says about one lease: a sum, or why there is none."""

    lease: int
    total: Sum | None = None
    failure: str = ""
    # How large it is; infinite if it is not finite.
    norm: float = 0.0


class Gate:
    """Where things happen in order, but not while it is shut: a process that stands still, and wakes up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._shut_until = 0.0
        self._is_gone = False
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def vanish(self) -> None:
        """The process is dead: nothing happens here any more."""
        self._is_gone = True
        self._waiting.clear()

    def shut(self, seconds: float) -> None:
        self._shut_until = max(self._shut_until, self._world.now + seconds)
        self._world.at(self._shut_until, self._open)

    def enter(self, act: Callable[..., None], *args: Any) -> None:
        if self._is_gone:
            return
        if self._waiting or self._world.now < self._shut_until:
            self._waiting.append((act, args))
        else:
            act(*args)

    def _open(self) -> None:
        while self._waiting and self._world.now >= self._shut_until:
            act, args = self._waiting.popleft()
            act(*args)


class Line:
    """One connection: what is said arrives in order, later, or (once an end is closed) not at all."""

    def __init__(self, world: World, machine: Machine, desk: Desk) -> None:
        self.machine = machine
        self.desk = desk
        self.name = ""
        self.is_ready = False
        self.is_open_at_desk = True
        self.is_open_at_node = True
        self.version: int | None = None
        # Works on their way: (leases, batches, when sent); answers come in the same order.
        self.works: deque[tuple[list[int], int, float]] = deque()
        self.answered_at = 0.0
        self._world = world
        self._arrived_at_desk = self._arrived_at_node = 0.0

    def to_desk(self, act: Callable[..., None], *said: Any) -> None:
        self._arrived_at_desk = max(self._arrived_at_desk, self._arrival())
        self._world.at(self._arrived_at_desk, self.desk.gate.enter, act, self, *said)

    def to_node(self, act: Callable[..., None], *said: Any) -> None:
        self._arrived_at_node = max(self._arrived_at_node, self._arrival())
        self._world.at(self._arrived_at_node, self.machine.do, self.machine.life, self._arrive, act, said)

    def _arrival(self) -> float:
        """When what is said now gets there: later if it is lost on the way, or while nobody is reached."""
        return max(self._world.now, self.machine.cut_off_until) + self._world.delay()

    def _arrive(self, act: Callable[..., None], said: tuple[Any, ...]) -> None:
        if self.is_open_at_node:
            self.machine.core.heard(self._world.now)
            act(*said)


class Machine:
    """One node, through all its lives."""

    def __init__(self, world: World, name: str, batch_seconds: float) -> None:
        self.name = name
        self.batch_seconds = batch_seconds
        self.life = 0
        self.is_alive = False
        self.cut_off_until = 0.0
        self._gate = Gate(world)
        self._world = world
        self._rng = random.Random(f"{world.scenario.seed} {name}")
        self._line: Line | None = None
        self._version = -1
        self._is_computing = False
        self.core = nd.NodeCore(self._rng, WAIT_SECONDS)

    # --- life -------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.is_alive:
            return
        self.life += 1
        self.is_alive = True
        self._version, self._is_computing = -1, False
        self.core = nd.NodeCore(self._rng, WAIT_SECONDS)
        self._perform(self.core.start(self._world.now))
        self._after(nd.TICK_SECONDS, self._tick)

    def crash(self) -> None:
        """Die without a word; the kernel closes the connection."""
        self.cut()
        self._end()

    def cut(self) -> None:
        """The connection breaks under our hands."""
        line, self._line = self._line, None
        if line is not None:
            line.is_open_at_node = False
            line.to_desk(line.desk.lost, "connection reset")
            self._after(0.0, self._tell, nd.Lost("connection reset"))

    def freeze(self, seconds: float) -> None:
        self._gate.shut(seconds)

    def _end(self) -> None:
        self.is_alive = False
        self.life += 1
        self._gate = Gate(self._world)

    def do(self, life: int, act: Callable[..., None], *args: Any) -> None:
        """Whatever happens in a process happens in one life, and not while it is frozen."""
        if life == self.life:
            self._gate.enter(self._live, life, act, args)

    def _live(self, life: int, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if life == self.life:
            act(*args)

    def _after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self._world.at(self._world.now + seconds, self.do, self.life, act, *args)

    # --- decide, then do --------------------------------------------------------------------------

    def _tell(self, event: nd.Event) -> None:
        self._perform(self.core.handle(event, self._world.now))

    def _perform(self, effects: list[nd.Effect]) -> None:
        for effect in effects:
            match effect:
                case nd.Dial():
                    require(
                        0.0 <= effect.after_seconds <= nd.RETRY_SECONDS_MOST, f"{self.name} wants {effect}"
                    )
                    self._after(effect.after_seconds + self._world.delay(), self._open)
                case nd.Greet():
                    self._say("greeted", self.name)
                case nd.CheckModel():
                    self._after(self._world.scenario.checking_seconds, self._tell, nd.Checked())
                case nd.SayReady():
                    require(
                        self._line is None or bool(self._line.name),
                        f"{self.name} is ready before its welcome",
                    )
                    self._say("readied")
                case nd.SayBeat():
                    self._say("beaten")
                case nd.Handle():
                    require(not self._is_computing, f"{self.name} is given {effect} while it computes")
                    self._is_computing = True
                    self._handle(effect.item)
                case nd.HangUp():
                    self.cut()
                case nd.Exit():
                    self._leave()

    def _tick(self) -> None:
        self._after(nd.TICK_SECONDS, self._tick)
        self._tell(nd.TimePassed())

    def _say(self, what: str, *said: Any) -> None:
        if self._line is not None:
            self._line.to_desk(getattr(self._line.desk, what), *said)

    # --- connection -------------------------------------------------------------------------------

    def _open(self) -> None:
        desk = self._world.desk
        if desk is None or self._world.now < self.cut_off_until:
            self._tell(nd.Lost("nothing answers"))
            return
        self._line = desk.connect(self)
        self._tell(nd.Opened())

    def _leave(self) -> None:
        self.cut()
        self._end()

    def welcomed(self, name: str) -> None:
        self.name = name
        self._tell(nd.Welcomed())

    def heard(self) -> None:
        """The coordinator beats, or says why an answer changed nothing."""

    def given(self, item: Params | Work) -> None:
        self._tell(nd.Given(item, [lease.id for lease in item.leases] if isinstance(item, Work) else []))

    def cancelled(self, leases: list[int]) -> None:
        self._tell(nd.Cancelled(leases))

    def reset(self) -> None:
        """The coordinator closed the connection."""
        if self._line is not None:
            self._line.is_open_at_node = False
            self._line = None
            self._tell(nd.Lost("closed by the coordinator"))

    def parted(self, reason: str) -> None:
        self._tell(nd.Parted(reason, finished=False))

    # --- work -------------------------------------------------------------------------------------

    def _handle(self, item: Params | Work) -> None:
        if isinstance(item, Params):
            self._version = item.version
            self._after(0.0, self._done)
        else:
            self._compute(self._line, item, [])

    def _compute(self, line: Line | None, work: Work, answers: list[Answer]) -> None:
        """Compute what follows the leases already answered, one after another."""
        if len(answers) == len(work.leases):
            self._answer(line, answers)
            return
        lease = work.leases[len(answers)]
        if lease.id in self.core.cancelled:
            self._compute(line, work, [*answers, Answer(lease.id)])
            return
        works = (1 - self._world.failure_chance(self)) ** lease.span.count
        if works < 1 and self._rng.random() >= works:
            answer = Answer(lease.id, failure="it does not compute")
        else:
            first = lease.step.first
            span = lease.span
            total = canonical(lease.step.epoch, first + span.start, first + span.stop, self._version)
            lie = self._world.lie(self)
            if lie:
                answer = Answer(lease.id, LIE, norm=lie)
            else:
                answer = Answer(lease.id, total, norm=self._world.scenario.norm(lease))
        uneven = self._rng.uniform(-1, 1) * self._world.scenario.unevenness
        self._after(
            self.batch_seconds * lease.span.count * max(0.1, 1 + uneven),
            self._compute,
            line,
            work,
            [*answers, answer],
        )

    def _answer(self, line: Line | None, answers: list[Answer]) -> None:
        is_heard_anyway = "ghost" in self._world.scenario.faults
        if line is not None and (line.is_open_at_node or is_heard_anyway):
            line.to_desk(line.desk.updated, answers)
        self._done()

    def _done(self) -> None:
        self._is_computing = False
        self._tell(nd.Finished())
