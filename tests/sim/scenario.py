"""A scenario: what one seed makes of a run. Its size, its nodes, its network and its faults, all drawn here.

Swarm style: each kind of fault is switched on in about half of the seeds, because faults that are always
all on hide one another. Decides nothing and runs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from w5xde.control.steps.plan import StepPlan
from w5xde.control.validation_decisions import ALONE_SECONDS
from w5xde.learn.model.route import LARGE_BYTES_MIN, is_large
from w5xde.messages import Loan
from w5xde.specs.robust_rule import Robust, parse_robust
from w5xde.specs.round_lengths import RoundLengths

FAULTS = (
    "crash",  # a node's process dies, and mostly comes back
    "cut",  # a connection breaks, both ends live on
    "freeze",  # a node stops without a word (SIGSTOP), and wakes up
    "exodus",  # everybody is gone for a while
    "pause",  # the coordinator stands still
    "late",  # nodes that join while others work
    "crawl",  # nodes ten times slower than they would be
    "failure",  # a batch fails on a node, now and then
    "broken",  # a node on which every batch fails
    "echo",  # what a node said is heard twice
    "ghost",  # what a node said is heard although its connection was given up
    "impostor",  # an answer comes from a node that was not lent the batch
    "stop",  # the run is asked to finish politely
    "loss",  # packets get lost, and are sent again later
    "partition",  # a node and the coordinator do not hear each other for a while
    "kill",  # the coordinator's process dies, at some operation, and is started again
    "power",  # its machine loses power: what was not synced is torn or gone
    "full",  # the disk is full, or cannot sync, for a while
    "rot",  # bits of the newest checkpoint flip while the coordinator is dead
    "revenant",  # answers to leases of an earlier life come in a later one
    "liar",  # a node whose updates are now and then not finite, or far too large
    "steep",  # batches whose gradients are honestly far larger than the others'
    "spoiled",  # a step that would leave numbers that are not finite, and is undone
)
# Faults of numbers have a chance of their own, so that a seed's other faults do not depend on them.
_OF_NUMBERS = ("liar", "steep", "spoiled")
# Only in rounds mode: the replica of a node is not what it should be, now and then.
DAMAGE = "damage"
# Only where any batch can be read at any time: the data set fails on some of them.
UNREADABLE = "unreadable"
# Seeds with these remainders of 16 are runs in rounds: all but the fourth like most, that one deadly.
ROUNDS = (1, 6, 9, 7, 14)
_DEADLY = ("rot", "revenant", "failure", "broken", "cut")
# Few enough for a seed to take milliseconds, many enough for several steps of any size.
BATCHES_MAX = 160
# A coordinator that stands still longer than this loses its nodes, whatever it decides afterwards.
PAUSES_SECONDS = (0.5, 1.5, 6.0, 15.0)


class Blow(NamedTuple):
    """One fault at one moment; `node` counts into the pool, where the fault strikes a single one."""

    at: float
    kind: str
    node: int
    seconds: float


class Death(NamedTuple):
    """The coordinator dies at its n-th operation, of its own or with its machine."""

    point: int
    power: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that can differ between two runs of the simulated world."""

    # Seconds a batch takes on each node.
    nodes: tuple[float, ...]
    # Per epoch the sizes of its batches.
    epochs: tuple[tuple[int, ...], ...]
    step_batches: int
    batch_size: int
    seed: int = 0
    mode: str = "sync"
    staleness: int = 64
    is_stream: bool = False
    epoch_limit: int | None = None
    step_limit: int | None = None
    seconds_limit: float | None = None
    # How long a message travels, the learner steps, the loader reads, a node checks its model: at most.
    delay_seconds: float = 0.001
    learner_seconds: float = 0.0
    reading_seconds: float = 0.0
    checking_seconds: float = 0.0
    tick_seconds: float = 0.1
    # A batch takes up to this share more or less than usual (and at least a tenth of it).
    unevenness: float = 0.0
    faults: tuple[str, ...] = ()
    blows: tuple[Blow, ...] = ()
    joins_at: tuple[float, ...] = ()
    failure_chance: float = 0.0
    loss_chance: float = 0.0
    # The largest norm that is believed; honest ones are about 1, steep ones 50, those of lies more.
    max_update_norm: str = "off"
    # The share of leases that is computed again, and how long that takes at most.
    verify: float = 0.0
    verifying_seconds: float = 0.0
    # Steps are shared out evenly, as their robust mean needs it; what they come to stays a sum here.
    robust: str = "off"
    # What is kept, and how long writing it and starting again take.
    durability: str = "checkpoint"
    save_seconds: float | None = None
    save_steps: int | None = None
    skip_bad_batches: bool = False
    writing_seconds: float = 0.0
    starting_seconds: float = 0.0
    # At which operations of the coordinator (effects and writes, counted over all its lives) it dies.
    deaths: tuple[Death, ...] = ()
    # How long a vector is; from a megabyte on updates come in one at a time, and take this long at most.
    vector_bytes: int = 1000
    transfer_seconds: float = 0.0
    # How many of the nodes can run at once on the one machine they share; 0: each has its own.
    slots: int = 0
    # In rounds mode: the most steps of a round, and by how many steps it grows by one (0: it does not grow).
    round_most: int = 0
    round_growth: int = 0
    # How many batches at once the last node has memory for; 0: any number.
    memory_batches: int = 0
    # A pool: each epoch is a call, which a caller gives when the one before has ended, and may give up.
    is_pool: bool = False
    # The sizes of the batches of a validation set, if nodes measure one; and when, and what waits for it.
    validation: tuple[int, ...] = ()
    evaluate_every: int | None = None
    evaluation_policy: str = "wait"
    steps: tuple[tuple[int, int, tuple[int, ...]], ...] = field(init=False)
    # The number of steps of each round, by its first step; empty in other modes.
    rounds: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        # What the plan must come to, worked out another way: (epoch, first batch, sizes) of every step.
        found = [
            (epoch, first, sizes[first : first + self.step_batches])
            for epoch, sizes in enumerate(self.epochs)
            for first in range(0, len(sizes), self.step_batches)
        ]
        object.__setattr__(self, "steps", tuple(found[: self.step_limit]))
        object.__setattr__(self, "rounds", dict(self._divide()) if self.is_rounds else {})

    def _divide(self) -> Iterator[tuple[int, int]]:
        """The rounds, worked out another way: steps in a row of one form and one epoch, as many as may be."""
        first = 0
        while first < len(self.steps):
            most = self.round_most
            if self.round_growth:
                most = min(most, max(2, first // self.round_growth))
            forms = [(epoch, len(sizes)) for epoch, _, sizes in self.steps[first : first + most]]
            count = next((i for i, form in enumerate(forms) if form != forms[0]), len(forms))
            yield first, count
            first += count

    def plans(self) -> Iterator[StepPlan]:
        """All steps, or rounds, of a run that nothing disturbs."""
        for index, (epoch, first, sizes) in enumerate(self.steps):
            if not self.is_rounds:
                yield StepPlan(index, epoch, first, sizes, ends_epoch=False)
            elif index in self.rounds:
                place = self.planned(index, self.rounds[index])
                yield StepPlan(index, *place, ends_epoch=False, columns=len(sizes))

    @property
    def validations(self) -> set[int]:
        """The versions after each epoch, if they are to be validated."""
        if not self.validation or self.evaluate_every:
            return set()
        ends = {epoch: index + 1 for index, (epoch, _, _) in enumerate(self.steps)}
        return set(ends.values())

    @property
    def is_rounds(self) -> bool:
        return self.mode == "rounds"

    @property
    def round_lengths(self) -> RoundLengths | None:
        return RoundLengths(self.round_most, self.round_growth) if self.is_rounds else None

    def norm(self, loan: Loan) -> float:
        """How large an honest update for this lease is: one in five batches may be steep."""
        norms = []
        for batch in loan.batches:
            chance = random.Random(f"{self.seed} {loan.epoch} {batch.index}")
            is_steep = "steep" in self.faults and chance.random() < 0.2
            share = 1.0 if loan.apart or self.is_rounds else batch.samples / loan.samples
            norms.append(share * chance.uniform(0.8, 1.2) * (50.0 if is_steep else 1.0))
        return sum(norms)

    @property
    def is_large(self) -> bool:
        return is_large(self.vector_bytes)

    @property
    def stretches(self) -> bool:
        """Whether nodes may make steps of their own."""
        is_single = self.mode == "async" and self.step_batches == 1
        needs_gradients = self.verify > 0 or self.max_update_norm not in ("auto", "off")
        return is_single and self.durability == "checkpoint" and not self.is_large and not needs_gradients

    def planned(self, index: int, count: int) -> tuple[int, int, tuple[int, ...]]:
        """What so many steps from this one on must be: their epoch, first batch and sizes."""
        steps = self.steps[index : index + count]
        epochs = {epoch for epoch, _, _ in steps}
        if len(steps) != count or len(epochs) != 1:
            raise AssertionError(f"steps {index} to {index + count} are not {count} of one epoch")
        return steps[0][0], steps[0][1], tuple(size for _, _, sizes in steps for size in sizes)

    def can_hold(self, node: str, batches: int) -> bool:
        """Whether the node of this name has memory for so many batches at once."""
        is_small = self.memory_batches > 0 and node.partition("-")[0] == f"n{len(self.nodes) - 1}"
        return not is_small or batches <= self.memory_batches

    @property
    def rule(self) -> Robust | None:
        return parse_robust(self.robust)

    @property
    def batches(self) -> int:
        return sum(len(sizes) for _, _, sizes in self.steps)

    @property
    def quiet_at(self) -> float:
        """When the last fault is over."""
        return max([blow.at + blow.seconds for blow in self.blows] + [*self.joins_at, 0.0])

    @property
    def deadline(self) -> float:
        """When a run must be over if one node is healthy from `quiet_at` on, the slowest and all alone."""
        slowest = (max(self.nodes) + 4 * self.delay_seconds) * (1 + self.unevenness)
        slowest += self.verifying_seconds * (self.verify > 0) + self.transfer_seconds + self.reading_seconds
        overheads = len(self.steps) * (self.learner_seconds + self.reading_seconds + 4 * self.delay_seconds)
        if self.loss_chance:
            slowest += 4.0 * self.loss_chance
            overheads += len(self.steps) * 4.0 * self.loss_chance
        # Twice, because it may be computing what was just made superfluous; a minute for silence and backoff.
        step_batches = self.step_batches * max(1, self.round_most)
        if self.is_pool:
            step_batches = max(len(sizes) for _, _, sizes in self.steps)
            overheads += len(self.steps)  # the caller takes its time
        alone = 60.0 + 2 * self.batches * slowest + overheads + 4 * step_batches * slowest
        if self.validation:
            # After each epoch or some steps, and at the end; and without nodes a while is waited for one.
            validations = len(self.steps) // self.evaluate_every if self.evaluate_every else len(self.epochs)
            rests = len(self.blows) * ALONE_SECONDS
            alone += rests + 2 * (validations + 2) * (len(self.validation) * slowest + overheads)
        # Each life may have to begin anew.
        return self.quiet_at + alone + len(self.deaths) * (alone + self.starting_seconds)

    def is_unreadable(self, epoch: int, batch: int) -> bool:
        """Whether the data set fails on a batch, until somebody mends it: one in eight."""
        is_bad = random.Random(f"{self.seed} {epoch} {batch} unreadable").random() < 0.125
        return UNREADABLE in self.faults and is_bad

    @staticmethod
    def pool_of_seed(seed: int) -> Scenario:
        """A pool with the nodes and the faults that a run of this seed would have; nothing is kept of it."""
        rng, scenario = random.Random(f"{seed} pool"), _of_seed(seed)
        epochs = tuple((scenario.batch_size,) * rng.randint(1, 24) for _ in range(rng.randint(2, 12)))
        kept = {"kill", "power", "full", "rot", "revenant", "stop"}
        return replace(
            scenario,
            is_pool=True,
            mode="sync",
            is_stream=True,
            epochs=epochs,
            step_batches=65536,
            epoch_limit=len(epochs),
            step_limit=None,
            seconds_limit=None,
            faults=tuple(fault for fault in scenario.faults if fault not in kept),
            blows=tuple(blow for blow in scenario.blows if blow.kind not in {"full", "broken", "stop"}),
            reading_seconds=0.0,
            robust="off",
            durability="checkpoint",
            save_seconds=None,
            save_steps=None,
            skip_bad_batches=True,
            deaths=(),
            vector_bytes=rng.choice((1000, 4 * LARGE_BYTES_MIN)),
            transfer_seconds=rng.choice((0.0, 0.01, 0.3)),
        )

    @staticmethod
    def of_seed(seed: int) -> Scenario:
        scenario = _validated(Scenario._readable(seed))
        # Drawn on its own, so that what else a seed means does not depend on it.
        if scenario.is_stream or random.Random(f"{seed} unreadable").random() < 0.4:
            return scenario
        return replace(scenario, faults=(*scenario.faults, UNREADABLE))

    @staticmethod
    def _readable(seed: int) -> Scenario:
        if seed % 8 == 5:
            scenario = replace(
                _of_seed(seed), mode="async", step_batches=1, durability="checkpoint", robust="off"
            )
            # Half of them with batches so short that nodes make steps of their own.
            quick = tuple(min(seconds, 0.0005) for seconds in scenario.nodes)
            return replace(scenario, nodes=quick, verify=0.0) if seed % 16 == 13 else scenario
        # Drawn on their own, so that what else a seed means does not depend on them.
        scenario, large, slow = _of_seed(seed), random.Random(f"{seed} large"), random.Random(f"{seed} slow")
        if seed % 16 in ROUNDS:
            scenario = _rounds(scenario)
        if scenario.reading_seconds:
            scenario = replace(scenario, reading_seconds=slow.choice((0.05, 1.0)))
        if large.random() < 0.7:
            return scenario
        seconds = large.choice((0.0, 0.01, 0.3, 1.5))
        return replace(scenario, vector_bytes=4 * LARGE_BYTES_MIN, transfer_seconds=seconds)


def _validated(scenario: Scenario) -> Scenario:
    """Let nodes measure a validation set in some runs. Drawn on its own, like other late inventions."""
    chance = random.Random(f"{scenario.seed} validation")
    if chance.random() < 0.6:
        return scenario
    sizes = (chance.randint(1, 4),) * chance.randint(1, 12)
    return replace(
        scenario,
        validation=sizes,
        evaluate_every=chance.choice((None, 2, 5)),
        evaluation_policy=chance.choice(("wait", "skip", "hold")),
    )


def _of_seed(seed: int) -> Scenario:
    rng = random.Random(seed)
    if seed % 16 == 11:
        return _gappy(seed, rng)
    if seed % 4 == 3:
        return _deadly(seed, rng)
    numbers = random.Random(f"{seed} numbers")
    faults = _faults(rng, numbers, lambda kind: 0.5)
    batch_seconds = _pool(rng, faults)
    step_batches = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 8, 13, 16, 32, 64))
    batch_size = rng.randint(1, 4)
    epochs = _epochs(rng, step_batches, batch_size)
    total = sum(len(sizes) for sizes in epochs)
    expected = total / sum(1 / seconds for seconds in batch_seconds)
    is_async = rng.random() < 0.4
    step_limit = (
        rng.randint(1, len(epochs) * -(-len(epochs[0]) // step_batches)) if rng.random() < 0.2 else None
    )
    late = [rng.uniform(0, expected) for _ in batch_seconds]
    save_steps = rng.choice((1, 2, 5, 20)) if rng.random() < 0.5 else None
    return Scenario(
        nodes=batch_seconds,
        epochs=epochs,
        step_batches=step_batches,
        batch_size=batch_size,
        seed=seed,
        mode="async" if is_async else "sync",
        staleness=rng.choice((0, 1, 2, 3, 8, 16, 64)),
        is_stream=rng.random() < 0.3,
        epoch_limit=None if step_limit is not None and rng.random() < 0.5 else len(epochs),
        step_limit=step_limit,
        seconds_limit=rng.uniform(0, 2 * expected) if rng.random() < 0.05 else None,
        delay_seconds=rng.choice((0.0, 0.001, 0.02, 0.2)),
        learner_seconds=rng.choice((0.0, 0.0, 0.01, 0.3)),
        reading_seconds=rng.choice((0.0, 0.0, 0.05)),
        checking_seconds=rng.choice((0.0, 0.0, 0.2, 2.0)),
        tick_seconds=rng.choice((0.1, 0.3, 0.9)),
        unevenness=rng.choice((0.0, 0.1, 0.5, 3.0)),
        faults=faults,
        blows=tuple(sorted(_blows(rng, faults, len(batch_seconds), expected))),
        joins_at=tuple(late) if "late" in faults else (),
        failure_chance=rng.choice((0.01, 0.1)) if "failure" in faults else 0.0,
        loss_chance=rng.uniform(0.0, 0.3) if "loss" in faults else 0.0,
        max_update_norm=numbers.choice(("auto", "100")),
        verify=numbers.choice((0.0, 0.0, 0.3, 1.0)),
        verifying_seconds=numbers.choice((0.0, 0.05, 1.0)),
        robust="off" if is_async else _robust(seed),
        durability=rng.choice(("checkpoint", "step")),
        save_seconds=None if save_steps else rng.choice((0.1, 1.0, 30.0)),
        save_steps=save_steps,
        skip_bad_batches=rng.random() < 0.5,
        writing_seconds=rng.choice((0.0, 0.01, 0.5)),
        starting_seconds=rng.choice((0.0, 0.1, 2.0)),
        deaths=_deaths(rng, faults),
        slots=rng.choice((0, 0, 1, 2)),
    )


def _rounds(scenario: Scenario) -> Scenario:
    """The same in rounds mode, with fewer columns and more steps, and nodes whose replica gets damaged."""
    rng = random.Random(f"{scenario.seed} rounds")
    step_batches = rng.choice((1, 2, 2, 3, 3, 4, 5, 8))
    growth, most = rng.choice(((0, 1), (0, 2), (0, 4), (1, 3), (1, 6), (2, 5), (3, 4), (4, 9)))
    is_deadly = scenario.seed % 4 == 3
    epochs = scenario.epochs if is_deadly else _epochs(rng, step_batches, scenario.batch_size, 24)
    steps = len(epochs) * -(-len(epochs[0]) // step_batches)
    is_damaged, is_small = rng.random() < 0.5, rng.random() < 0.3 and len(scenario.nodes) > 1
    return replace(
        scenario,
        mode="rounds",
        step_batches=step_batches,
        epochs=epochs,
        epoch_limit=len(epochs) if scenario.epoch_limit is not None else None,
        step_limit=rng.randint(1, steps) if scenario.step_limit is not None else None,
        faults=(*scenario.faults, *([DAMAGE] if is_damaged else [])),
        robust=_robust(scenario.seed),
        round_most=most,
        round_growth=growth,
        memory_batches=rng.randint(1, most) if is_small else 0,
    )


def _robust(seed: int) -> str:
    """Drawn on its own, so that what else a seed means does not depend on it."""
    return random.Random(f"{seed} robust").choice(("off", "off", "off", "trim:1", "trim:2", "median"))


def _faults(rng: random.Random, numbers: random.Random, chance: Callable[[str], float]) -> tuple[str, ...]:
    return tuple(kind for kind in FAULTS if (numbers if kind in _OF_NUMBERS else rng).random() < chance(kind))


def _deadly(seed: int, rng: random.Random) -> Scenario:
    """A short run on a bad disk whose coordinator dies again and again: all that is rare elsewhere."""
    numbers = random.Random(f"{seed} numbers")
    # In every other one the numbers are sound: what a disk forgets shows rarely enough as it is.
    is_sound = seed // 4 % 2 == 1
    faults = _faults(
        rng,
        numbers,
        lambda kind: 0.8 if kind in _DEADLY else 0.0 if is_sound and kind in _OF_NUMBERS else 0.3,
    )
    batches = rng.randint(2, 8)
    batch_seconds = tuple(rng.uniform(0.05, 0.2) for _ in range(rng.randint(1, 3)))
    expected = 2 * batches / sum(1 / seconds for seconds in batch_seconds)
    first = rng.randint(1, 120)
    points = {first, *(first + rng.randint(1, 80) for _ in range(rng.randint(1, 3)))}
    trouble = rng.choice(("full", "broken"))
    return Scenario(
        nodes=batch_seconds,
        epochs=((2,) * batches,) * 2,
        step_batches=rng.choice((1, 2, 3)),
        batch_size=2,
        seed=seed,
        mode=rng.choice(("sync", "async")),
        staleness=8,
        is_stream=rng.random() < 0.3,
        epoch_limit=2,
        learner_seconds=rng.choice((0.0, 0.05)),
        faults=faults,
        blows=(
            *_blows(rng, faults, len(batch_seconds), expected),
            *(Blow(rng.uniform(0, 2 * expected), trouble, 0, rng.uniform(0.05, 0.5)) for _ in range(3)),
        ),
        failure_chance=0.2 if "failure" in faults else 0.0,
        max_update_norm="off" if is_sound else numbers.choice(("auto", "100")),
        verify=0.0 if is_sound else numbers.choice((0.0, 0.0, 0.3, 1.0)),
        verifying_seconds=numbers.choice((0.0, 0.1)),
        durability=rng.choice(("checkpoint", "step", "step")),
        save_seconds=None,
        save_steps=rng.choice((1, 3)),
        skip_bad_batches=rng.random() < 0.5,
        writing_seconds=rng.choice((0.0, 0.3, 3.0)),
        starting_seconds=0.1,
        deaths=tuple(Death(point, rng.random() < 0.5) for point in sorted(points)),
    )


def _gappy(seed: int, rng: random.Random) -> Scenario:
    """A log of steps that misses one, a checkpoint that takes long, and a death before that is written.

    Rare elsewhere: a step must fail to be logged, and the coordinator die while the checkpoint that would
    make up for it is on its way.
    """
    batches = rng.randint(8, 16)
    batch_seconds = tuple(rng.uniform(0.05, 0.2) for _ in range(rng.randint(1, 2)))
    expected = 2 * batches / sum(1 / seconds for seconds in batch_seconds)
    trouble = Blow(rng.uniform(0, expected / 2), rng.choice(("full", "broken")), 0, rng.uniform(0.05, 0.3))
    return Scenario(
        nodes=batch_seconds,
        epochs=((2,) * batches,) * 2,
        step_batches=1,
        batch_size=2,
        seed=seed,
        mode=rng.choice(("sync", "async")),
        staleness=8,
        epoch_limit=2,
        blows=(trouble,),
        durability="step",
        save_steps=rng.choice((1, 3)),
        writing_seconds=rng.choice((1.0, 3.0)),
        starting_seconds=0.1,
        deaths=tuple(
            Death(point, rng.random() < 0.5) for point in sorted({rng.randint(60, 250) for _ in range(2)})
        ),
    )


def _deaths(rng: random.Random, faults: tuple[str, ...]) -> tuple[Death, ...]:
    kinds = [kind for kind in ("kill", "power") if kind in faults]
    points = [rng.choice((rng.randint(1, 60), rng.randint(1, 2000))) for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.5:
        # Again soon after the first: what one life half did, the next relied on.
        points.append(min(points) + rng.randint(1, 60))
    return tuple(Death(point, rng.choice(kinds) == "power") for point in sorted(set(points))) if kinds else ()


def _pool(rng: random.Random, faults: tuple[str, ...]) -> tuple[float, ...]:
    count = rng.choice((1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, rng.randint(9, 16), rng.randint(9, 64)))
    base = rng.choice((0.0005, 0.005, 0.05, 0.05, 0.5))
    crawl = 10.0 if "crawl" in faults else 1.0
    return tuple(base * rng.uniform(1, 10) * (crawl if rng.random() < 0.25 else 1.0) for _ in range(count))


def _epochs(
    rng: random.Random, step_batches: int, batch_size: int, steps_most: int = 6
) -> tuple[tuple[int, ...], ...]:
    count = rng.randint(1, 3)
    # Whole steps, and steps cut short by the end of the epoch.
    batches = rng.randint(1, max(1, min(BATCHES_MAX // count, steps_most * step_batches)))
    if rng.random() < 0.3:
        batches = max(step_batches, batches - batches % step_batches)
    last = rng.randint(1, batch_size)
    return ((batch_size,) * (batches - 1) + (last,),) * count


def _blows(rng: random.Random, faults: tuple[str, ...], nodes: int, expected: float) -> list[Blow]:
    blows: list[Blow] = []
    for kind in ("crash", "cut", "freeze"):
        if kind in faults:
            for _ in range(rng.randint(1, 3)):
                away = rng.choice((rng.uniform(0, expected), rng.uniform(1, 20)))
                blows.append(Blow(rng.uniform(0, 1.5 * expected), kind, rng.randrange(nodes), away))
    if "exodus" in faults:
        blows.append(Blow(rng.uniform(0, expected), "exodus", 0, rng.uniform(0.5, 15)))
    if "pause" in faults:
        blows += [
            Blow(rng.uniform(0, 1.5 * expected), "pause", 0, rng.choice(PAUSES_SECONDS))
            for _ in range(rng.randint(1, 2))
        ]
    if "partition" in faults:
        for _ in range(rng.randint(1, 3)):
            blows.append(
                Blow(rng.uniform(0, expected), "partition", rng.randrange(nodes), rng.uniform(0.1, 20))
            )
    if "full" in faults:
        blows.append(Blow(rng.uniform(0, expected), rng.choice(("full", "broken")), 0, rng.uniform(0.1, 10)))
    if "stop" in faults:
        blows.append(Blow(rng.choice((rng.uniform(0, expected), rng.uniform(0, 60))), "stop", 0, 0.0))
    return blows
