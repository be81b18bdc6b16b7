"""A machine: the body of one simulated node around the real NodeCore, and its line to the coordinator.

Computes as long as its speed says, dies, freezes, wakes up. Knows nothing of what the coordinator decides.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from tests.sim.books import canonical, require
from tests.sim.counter import LIE, Sum
from tests.sim.fakes import Arriving
from tests.sim.rounds import NodeReplica
from tests.sim.validation import measured
from w5xde.control import node as nd
from w5xde.messages import Answer, Beat, Bye, Cancel, Difference, Loan, Message, Params, Update, Work
from w5xde.protocol.session import Session
from w5xde.protocol.wire import Limits

if TYPE_CHECKING:
    from tests.sim.coordinator import SimulatedCoordinator
    from tests.sim.world import World
    from w5xde.runtime.pipeline.peer import Peer

# As `w5xde join --wait` gives by default.
WAIT_SECONDS = 30.0


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
    """One connection: what is said arrives in order, later, or (once an end is closed) not at all.

    To the pipeline it is a connection like any other. What a node says after an update arrives after the
    whole of it.
    """

    peer: Peer
    limits = cast(Limits, None)
    session = cast(Session, None)
    link = reported_link = 0.0
    round_trip_seconds = None
    fault = ""
    bytes_sent = bytes_received = 0
    stuck_since: float | None = None
    frame_began: int | None = None

    def __init__(self, world: World, machine: Machine, coordinator: SimulatedCoordinator) -> None:
        self.machine = machine
        self.coordinator = coordinator
        self.is_open_here = True
        self.is_open_at_node = True
        self._world = world
        self._arrived_here = self._arrived_at_node = 0.0
        self._is_uploading = False
        # What arrived behind a body that is not complete.
        self._behind: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    # --- from the node ----------------------------------------------------------------------------

    def to_coordinator(self, act: Callable[..., None], *said: Any) -> None:
        self._arrived_here = max(self._arrived_here, self._arrival())
        self._world.at(self._arrived_here, self.coordinator.gate.enter, self._arrive_here, act, said)

    def _arrive_here(self, act: Callable[..., None], said: tuple[Any, ...]) -> None:
        if act == self.coordinator.lost:
            act(self, *said)
        elif self._is_uploading:
            self._behind.append((act, said))
        else:
            # It ends when the coordinator says so.
            self._is_uploading = act == self.coordinator.uploaded and self.is_open_here
            act(self, *said)

    def resume(self) -> None:
        """All of a body is here: what was said after it arrives."""
        self._is_uploading = False
        while self._behind and not self._is_uploading:
            act, said = self._behind.popleft()
            self._arrive_here(act, said)

    # --- to the node ------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        pieces: Sequence[Any] = (),
        sent: Callable[[], None] | None = None,
        *,
        hold: bool = False,
    ) -> None:
        if self.is_open_here:
            may_hear = self.peer.is_ready or isinstance(message, Beat)
            require(may_hear, f"{self.peer.name} is told {type(message).__name__} before it is ready")
            if isinstance(message, Work):
                self._check_places(message)
            self.to_node(self.machine.receive, message, b"".join(pieces))

    def _check_places(self, work: Work) -> None:
        """Every lease says which step of the plan it is of, or with which its steps begin."""
        for loan in work.loans:
            lease = self.coordinator.core.view.lease(loan.lease)
            require(lease is not None, f"lease {loan.lease} is sent, but is not outstanding")
            if lease is not None and lease.step.index >= 0:
                epoch, first, _ = self._world.scenario.steps[loan.step]
                is_there = (epoch, first) == (loan.epoch, lease.step.first)
                require(is_there, f"{lease} is sent as step {loan.step}")

    def go_on(self) -> None:
        self.coordinator.go_on(self)

    def close(self) -> None:
        raise AssertionError("the pipeline closes no connection")

    abort = close

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


# An answer, and the sums and norms of its vectors.
_Computed = tuple[Answer, list[Sum], list[float]]


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
        # In rounds mode: what it computes on, instead of a version of the coordinator's.
        self.replica = NodeReplica(name)
        self._is_computing = False
        self.core = nd.NodeCore(self._rng, WAIT_SECONDS)

    # --- life -------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.is_alive:
            return
        self.life += 1
        self.is_alive = True
        self._version, self._is_computing = -1, False
        self.replica = NodeReplica(self.name)
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
            line.to_coordinator(line.coordinator.lost, "connection reset")
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
                        self._line is None or bool(self._line.peer.name),
                        f"{self.name} is ready before its welcome",
                    )
                    self._say("readied", self._announced())
                case nd.SayBeat():
                    self._say("beaten")
                case nd.Handle():
                    require(not self._is_computing, f"{self.name} is given {effect} while it computes")
                    self._is_computing = True
                    self._handle(*effect.item)
                case nd.HangUp():
                    self.cut()
                case nd.Exit():
                    self._leave()

    def _announced(self) -> tuple[int, bytes]:
        """What it says of its replica, which may have suffered while nobody looked."""
        if self._world.damages(self):
            self.replica.damage()
        return self.replica.announced

    def _tick(self) -> None:
        self._after(nd.TICK_SECONDS, self._tick)
        self._tell(nd.TimePassed())

    def _say(self, what: str, *said: Any) -> None:
        if self._line is not None:
            self._line.to_coordinator(getattr(self._line.coordinator, what), *said)

    # --- connection -------------------------------------------------------------------------------

    def _open(self) -> None:
        coordinator = self._world.coordinator
        if coordinator is None or self._world.now < self.cut_off_until:
            self._tell(nd.Lost("nothing answers"))
            return
        self._line = coordinator.connect(self)
        self.replica.losses = 0
        self._tell(nd.Opened())

    def _leave(self) -> None:
        self.cut()
        self._end()

    def welcomed(self, name: str) -> None:
        self.name = name
        self._tell(nd.Welcomed())

    def receive(self, message: Message, body: bytes = b"") -> None:
        match message:
            case Params() | Difference():
                self._tell(nd.Given((message, body), []))
            case Work():
                self._tell(nd.Given((message, body), [loan.lease for loan in message.loans]))
            case Cancel():
                self._tell(nd.Cancelled(message.leases))
            case Bye():
                self._tell(nd.Parted(message.reason, finished=message.finished))
            case _:
                pass  # a beat, or why an answer changed nothing

    def reset(self) -> None:
        """The coordinator closed the connection."""
        if self._line is not None:
            self._line.is_open_at_node = False
            self._line = None
            self._tell(nd.Lost("closed by the coordinator"))

    # --- work -------------------------------------------------------------------------------------

    def _handle(self, message: Params | Difference | Work, body: bytes) -> None:
        if isinstance(message, Work):
            self._begin(self._line, message)
            return
        if self._world.scenario.is_pool:
            self._version = int(body)  # of the caller's weights
        elif not self._world.scenario.is_rounds:
            self._version = message.version
        elif isinstance(message, Params):
            self.replica.load(message, body)
        else:
            if message.adds and self._world.damages(self):
                self.replica.damage()
            self.replica.follow(message, body)
        self._after(0.0, self._done)

    def _begin(self, line: Line | None, work: Work) -> None:
        batches = sum(len(loan.batches) for loan in work.loans)
        if not self._world.scenario.can_hold(self.name, batches):
            self._drop(line, work)
            return
        if self._world.scenario.is_pool:
            require(work.call is not None, f"{self.name} is not told how to compute {work}")
        elif not self._world.scenario.is_rounds:
            require(work.version == self._version, f"{self.name} has {self._version}, and is sent {work}")
        elif not self.replica.fits(work):
            self._drop(line, work, differs=True)
            return
        self._compute(line, work, [])

    def _drop(self, line: Line | None, work: Work, *, differs: bool = False) -> None:
        dropped: list[_Computed] = [(Answer(loan.lease, dropped=True), [], []) for loan in work.loans]
        self._answer(line, work, dropped, differs=differs)

    def _compute(self, line: Line | None, work: Work, computed: list[_Computed]) -> None:
        """Compute what follows the leases already answered, one after another."""
        if len(computed) == len(work.loans):
            self._answer(line, work, computed)
            return
        loan = work.loans[len(computed)]
        if loan.lease in self.core.cancelled:
            self._compute(line, work, [*computed, (Answer(loan.lease, dropped=True), [], [])])
            return
        count = len(loan.batches)
        works = (1 - self._world.failure_chance(self)) ** count
        if works < 1 and self._rng.random() >= works:
            done: _Computed = (Answer(loan.lease, failure="it does not compute"), [], [])
        else:
            done = self._computed(loan)
        uneven = self._rng.uniform(-1, 1) * self._world.scenario.unevenness
        self._after(
            self.batch_seconds * count * max(0.1, 1 + uneven), self._compute, line, work, [*computed, done]
        )

    def _computed(self, loan: Loan) -> _Computed:
        """One sum for all batches of a lease, what a column comes to, or a lie."""
        lie = self._world.lie(self)
        scenario = self._world.scenario
        if loan.validates:
            version = self.replica.version if scenario.is_rounds else self._version
            # Only with --verify is a lie about a metric found.
            untrue = int(lie > 0 and scenario.verify == 1.0)
            rows = [measured(version + untrue, batch.index) for batch in loan.batches]
            return Answer(loan.lease, seconds=self.batch_seconds * len(rows), metrics=rows), [], []
        if lie:
            total = LIE
        elif scenario.is_rounds:
            version = self.replica.version
            total = self.replica.column([(loan.epoch, batch.index, version) for batch in loan.batches])
        else:
            total = canonical([(loan.epoch, batch.index, self._version) for batch in loan.batches])
        # A difference is judged by the mean of its steps.
        is_difference = loan.apart or scenario.is_rounds
        norm = lie * (len(loan.batches) if is_difference else 1) if lie else scenario.norm(loan)
        return Answer(loan.lease, seconds=self.batch_seconds * len(loan.batches)), [total], [norm]

    def _answer(
        self, line: Line | None, work: Work, computed: list[_Computed], *, differs: bool = False
    ) -> None:
        is_heard_anyway = "ghost" in self._world.scenario.faults
        if line is not None and (line.is_open_at_node or is_heard_anyway):
            update = Update(work.version, [answer for answer, _, _ in computed], differs=differs)
            sums = [total for _, sums, _ in computed for total in sums]
            norms = [norm for _, _, norms in computed for norm in norms]
            arriving = Arriving(update, sums, norms, self._world.scenario.vector_bytes)
            line.to_coordinator(line.coordinator.uploaded, update, arriving)
        self._done()

    def _done(self) -> None:
        self._is_computing = False
        self._tell(nd.Finished())
