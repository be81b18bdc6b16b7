"""Events that the coordinator's core handles, and effects that it returns.

Both name batches, leases and versions, never bytes: the pipeline that performs the effects adds the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from w5xde.control.steps.cut import Cut
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import Share
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span

# --- events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Joined:
    """A node passed every check, and leases may be granted to it.

    `slots`: how many nodes can run on its machine at once. `guess_seconds`: the time of a batch there,
    estimated from the canary; None if unknown.
    """

    node: str
    machine: str = ""
    slots: int = 1
    guess_seconds: float | None = None


@dataclass(slots=True)
class Left:
    """A node left, or its connection closed."""

    node: str
    reason: str


@dataclass(slots=True)
class Answered:
    """A node sent usable vectors for these leases, in one message.

    `batch_seconds`: the time per batch, transfer and waiting included. `compute_seconds`: the part of that
    time in which the node computed.
    """

    node: str
    leases: Sequence[int]
    batch_seconds: float
    compute_seconds: float | None = None
    # The share of `compute_seconds` for which the node used a core.
    core_share: float | None = None
    # The norm of the vector for each lease.
    norms: Sequence[float] = ()


@dataclass(slots=True)
class Failed:
    """A node could not compute a lease; or, if there is a `norm`, we rejected the update that it sent."""

    node: str
    lease: int
    reason: str
    norm: float | None = None


@dataclass(slots=True)
class Verified:
    """The coordinator computed a lease again.

    `wrong`: what is wrong with the node's answer. `unknown`: why the answer cannot be judged.
    """

    node: str
    lease: int
    wrong: str = ""
    unknown: str = ""


@dataclass(slots=True)
class Dropped:
    """A lease was not computed: its node skipped it, or it could not be sent.

    `batches`: the number of batches in the message, if the node skipped all of it: then they do not fit into
    its memory, unless they were cancelled. Otherwise 0.
    """

    node: str
    lease: int
    batches: int = 0


@dataclass(slots=True)
class Discovered:
    """The data stream has another batch of this epoch; with 0 samples, the epoch has ended."""

    epoch: int
    samples: int


@dataclass(slots=True)
class Stepped:
    """The learner has applied these steps, in this order.

    `durable`: all that is needed to apply them again after a crash was synced to disk before.
    """

    steps: Sequence[int]
    durable: bool = False


@dataclass(slots=True)
class Saved:
    """A checkpoint is on the disk, synced and read back."""

    steps: int


@dataclass(slots=True)
class SaveFailed:
    """A checkpoint could not be written."""

    reason: str


@dataclass(slots=True)
class Broke:
    """Training cannot continue: the learner, the loader or another part of the coordinator failed."""

    reason: str


@dataclass(slots=True)
class Stop:
    """The run shall end: complete the open steps as the mode allows, and open no other."""

    reason: str


@dataclass(slots=True)
class Ticked:
    """Time has passed.

    `load`: the share of a core that the coordinator needed on its `machine`. `heard`: when each node was last
    heard, for those that were heard since the tick before.
    """

    machine: str = ""
    load: float = 0.0
    heard: Mapping[str, float] = field(default_factory=dict)


# --- effects --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Assign:
    """Send these leases to the node in one message, and before it the parameters if the node lacks them."""

    node: str
    leases: list[Lease]
    # The ids of those whose answers will be verified.
    verify: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verify:
    """Compute this lease too and compare: the node's answer has arrived, and is held back until then."""

    lease: Lease


@dataclass(slots=True)
class CancelLeases:
    """Tell the node that these leases are no longer needed."""

    node: str
    leases: list[int]


@dataclass(slots=True)
class Expire:
    """These leases ended without an answer: their node left, or never received them. For the ledger only."""

    node: str
    leases: list[int]
    reason: str


@dataclass(slots=True)
class Reject:
    """Drop the answer to this lease, and tell the node why.

    `fenced`: the node does not hold this lease. Otherwise the lease ends with this answer.
    """

    node: str
    lease: int
    reason: str
    fenced: bool = False


@dataclass(slots=True)
class Fold:
    """Add the answer to this lease to its step.

    `staleness`: how many updates of the model were decided since the version that it was computed on.
    """

    lease: Lease
    staleness: int = 0


@dataclass(slots=True)
class Step:
    """Step the optimizer, or for a stretch add the steps that a node made: every batch is in, or set aside.

    `shares`: which node computed which batches, or which columns of a round. `rate`: a factor on the learning
    rate of this step alone, or on the difference that a stretch makes.
    """

    plan: StepPlan
    version: int
    shares: list[Share]
    rate: float = 1.0

    @property
    def steps(self) -> int:
        """The number of versions that it makes."""
        return self.plan.steps

    @property
    def samples(self) -> int:
        """The number of samples that take part: those of batches that were set aside do not."""
        if sum([stop - start for start, stop, _, _ in self.shares]) == self.plan.count:
            return self.plan.samples
        return sum(self.plan.samples_of(Span(start, stop)) for start, stop, _, _ in self.shares)

    @property
    def batches(self) -> int:
        """The number of batches that take part."""
        return sum([stop - start for start, stop, _, _ in self.shares]) * self.plan.leaf_batches


@dataclass(slots=True)
class Undone:
    """An event: the learner rolled this step back: numbers were not finite, or the optimizer raised.

    `is_final`: the run ends with it. Without a reason: the learner did not try this step, because it rolled
    an earlier one back.
    """

    step: Step
    reason: str = ""
    is_final: bool = False


@dataclass(slots=True)
class SetAside:
    """Leave the place of this batch, or column, in the step's tree empty: it failed on each of `nodes`."""

    plan: StepPlan
    span: Span
    reason: str
    nodes: list[str]


@dataclass(slots=True)
class Reopen:
    """Forget all sums of this step: it has changed nothing, and its batches are lent again.

    `empty`: the batches that were set aside, whose places in the tree stay empty.
    """

    plan: StepPlan
    version: int
    empty: list[Span]


@dataclass(slots=True)
class Save:
    """Write a checkpoint of exactly the steps decided so far."""

    cut: Cut


@dataclass(slots=True)
class Evaluate:
    """Evaluate the model as it is now, after this many steps."""

    step: int


@dataclass(slots=True)
class Close:
    """Close the connection of this node; unless `for_good`, without a word, so that it may reconnect."""

    node: str
    reason: str
    for_good: bool


@dataclass(slots=True)
class Ban:
    """Never admit this node again, whether it is connected now or not."""

    node: str
    reason: str


@dataclass(slots=True)
class Note:
    """A sentence for the user and the ledger, with its facts as data."""

    kind: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Finish:
    """End the run. An `error` says why it failed."""

    reason: str
    error: str = ""


Effect: TypeAlias = (
    Assign
    | Verify
    | CancelLeases
    | Expire
    | Reject
    | Fold
    | SetAside
    | Step
    | Reopen
    | Save
    | Evaluate
    | Close
    | Ban
    | Note
    | Finish
)

Event: TypeAlias = (
    Joined
    | Left
    | Answered
    | Failed
    | Verified
    | Dropped
    | Discovered
    | Stepped
    | Undone
    | Saved
    | SaveFailed
    | Broke
    | Stop
    | Ticked
)
