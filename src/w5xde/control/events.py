"""What the coordinator's core is told (events) and what it wants done (effects).

The core speaks of batches, leases and versions; whoever performs the effects attaches the bytes.
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
    """A node passed every check and may be lent work. Of those on one machine, `slots` can run at once.

    `guess_seconds` is what a batch may take it, by what it took to prove itself.
    """

    node: str
    machine: str = ""
    slots: int = 1
    guess_seconds: float | None = None


@dataclass(slots=True)
class Left:
    """A node is gone: it said so, or its connection closed."""

    node: str
    reason: str


@dataclass(slots=True)
class Answered:
    """A node sent usable vectors for these leases, in one message.

    A batch took it this long, transfer and waiting included; `compute_seconds` is the part of it that the
    node itself was busy.
    """

    node: str
    leases: Sequence[int]
    batch_seconds: float
    compute_seconds: float | None = None
    # How much of that time the node needed a core.
    core_share: float | None = None
    # Of each of the leases, how large a vector came.
    norms: Sequence[float] = ()


@dataclass(slots=True)
class Failed:
    """A node could not compute a lease, or (with its norm) what it sent was not usable."""

    node: str
    lease: int
    reason: str
    norm: float | None = None


@dataclass(slots=True)
class Verified:
    """The coordinator computed a lease again: what is wrong with the answer, or why it cannot tell."""

    node: str
    lease: int
    wrong: str = ""
    unknown: str = ""


@dataclass(slots=True)
class Dropped:
    """A lease was not computed: its node skipped it, or it could not be sent.

    `batches`: the node skipped a whole message of so many; unless they were cancelled, it cannot hold them.
    """

    node: str
    lease: int
    batches: int = 0


@dataclass(slots=True)
class Discovered:
    """The data stream gave another batch of an epoch, or (samples 0) the epoch ended there."""

    epoch: int
    samples: int


@dataclass(slots=True)
class Stepped:
    """The learner has applied these steps, in this order.

    `durable` if what it needs to do so again was synced before.
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
    """Training cannot go on (the learner or the loader says so)."""

    reason: str


@dataclass(slots=True)
class Stop:
    """Finish politely: the step in progress, and no other."""

    reason: str


@dataclass(slots=True)
class Ticked:
    """Time has passed. On its `machine` the coordinator needed this share of a core.

    `heard`: when each node was last heard, for those that were heard since the tick before.
    """

    machine: str = ""
    load: float = 0.0
    heard: Mapping[str, float] = field(default_factory=dict)


# --- effects --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Assign:
    """Send these leases to the node, together; with the parameters of their version if it lacks them."""

    node: str
    leases: list[Lease]
    # Those whose answers will be verified.
    verify: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verify:
    """Compute this lease too, and compare: its answer is there, and waits."""

    lease: Lease


@dataclass(slots=True)
class Cancel:
    """Tell the node that these leases are no longer needed."""

    node: str
    leases: list[int]


@dataclass(slots=True)
class Expire:
    """These leases ended without an answer: their node is gone, or never got them. Nothing to do but know."""

    node: str
    leases: list[int]
    reason: str


@dataclass(slots=True)
class Reject:
    """The answer to this lease changes nothing; tell the node why.

    `fenced`: the lease is none that the node holds; otherwise this was its answer, and ends it.
    """

    node: str
    lease: int
    reason: str
    fenced: bool = False


@dataclass(slots=True)
class Fold:
    """Add what came for this lease to its step; it was computed so many versions ago.

    Of a stretch that is so for its first batch; for each after it one more.
    """

    lease: Lease
    staleness: int = 0


@dataclass(slots=True)
class Step:
    """Every batch of the step is in: step the optimizer. `shares` tells who gave which batches.

    Of a stretch every batch is in: step it for each.
    """

    plan: StepPlan
    version: int
    shares: list[Share]

    @property
    def steps(self) -> int:
        """How many versions it makes."""
        return sum(stop - start for start, stop, _, _ in self.shares) if self.plan.apart else 1

    @property
    def samples(self) -> int:
        """Samples that take part: not those of a batch that was set aside."""
        if len(self.shares) == 1 and self.shares[0][1] - self.shares[0][0] == self.plan.count:
            return self.plan.samples
        return sum(sum(self.plan.sizes[start:stop]) for start, stop, _, _ in self.shares)


@dataclass(slots=True)
class Undone:
    """An event: the learner could not make this step, because numbers would not be finite, and is as before.

    Without a reason of its own: a step before it was undone, so that this one was not even tried.
    """

    step: Step
    reason: str = ""


@dataclass(slots=True)
class SetAside:
    """This batch of the step fails wherever it is tried: its place in the tree stays empty."""

    plan: StepPlan
    span: Span
    reason: str
    nodes: list[str]


@dataclass(slots=True)
class Reopen:
    """This step begins anew, and changed nothing: its batches are lent again. Of those that were set aside
    the places stay empty."""

    plan: StepPlan
    version: int
    empty: list[Span]


@dataclass(slots=True)
class Save:
    """Write a checkpoint of exactly the steps decided so far."""

    cut: Cut


@dataclass(slots=True)
class Evaluate:
    """Measure the model as it is now."""

    step: int


@dataclass(slots=True)
class Close:
    """Part with this node, for good or until it comes back by itself."""

    node: str
    reason: str
    for_good: bool


@dataclass(slots=True)
class Ban:
    """Let this node in no more, whether it is still here or has gone."""

    node: str
    reason: str


@dataclass(slots=True)
class Note:
    """Something a person may want to know, with the facts behind the sentence."""

    kind: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Finish:
    """The run is over. An `error` says that it did not end as it should."""

    reason: str
    error: str = ""


Effect: TypeAlias = (
    Assign
    | Verify
    | Cancel
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
