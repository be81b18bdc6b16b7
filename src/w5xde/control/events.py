"""Events that the coordinator's core handles, and effects that it returns.

Both name batches, leases and versions, never bytes: the pipeline that performs the effects adds the bytes.
What is done to the sum of a step is in `steps/step_effects.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from w5xde.control.steps.cut import Cut
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.step_effects import Fold as Fold
from w5xde.control.steps.step_effects import Reopen as Reopen
from w5xde.control.steps.step_effects import SetAside as SetAside
from w5xde.control.steps.step_effects import Step as Step
from w5xde.control.steps.step_effects import Undone as Undone

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
class Measured:
    """A node has measured the batches of a validation lease."""

    node: str
    lease: int


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
class Unreadable:
    """A lease was not sent, because the coordinator cannot read some of its batches.

    `reasons`: by the number of a batch in its epoch, why it cannot be read.
    """

    node: str
    lease: int
    reasons: Mapping[int, str]


@dataclass(slots=True)
class Discovered:
    """More batches of this epoch are known, with these numbers of samples; 0: the epoch has ended."""

    epoch: int
    sizes: Sequence[int]


@dataclass(slots=True)
class Called:
    """In a pool: the caller wants a step of batches of these sizes. Each call is an epoch of its own."""

    epoch: int
    sizes: Sequence[int]


@dataclass(slots=True)
class Withdrawn:
    """In a pool: the caller no longer waits for the step of this epoch."""

    epoch: int
    reason: str


@dataclass(slots=True)
class Stepped:
    """The learner has applied these steps, in this order.

    `durable`: all that is needed to apply them again after a crash was synced to disk before.
    """

    steps: Sequence[int]
    durable: bool = False


@dataclass(slots=True)
class Evaluated:
    """The evaluation that was asked for first has ended, with a result or without one."""


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
    """The run shall end: complete the open steps as the mode allows, and open no other.

    `interrupts`: it is not over then, and may be resumed. `hurries`: lend nothing more, and give up steps
    that are not complete within a few seconds.
    """

    reason: str
    interrupts: bool = False
    hurries: bool = False


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
class Save:
    """Write a checkpoint of exactly the steps decided so far."""

    cut: Cut


@dataclass(slots=True)
class Evaluate:
    """Evaluate the model as it is now, after this many steps, or after the evaluations asked for before."""

    step: int


@dataclass(slots=True)
class KeepMeasures:
    """Keep what a node measured in this validation lease, until every batch is measured."""

    lease: Lease


@dataclass(slots=True)
class Conclude:
    """The validation of the weights after this many steps has ended: say its result, or why it has none."""

    step: int
    failure: str = ""


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
    """End the run. An `error` says why it failed; `interrupted`: it was stopped before it was over."""

    reason: str
    error: str = ""
    interrupted: bool = False


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
    | KeepMeasures
    | Conclude
    | Close
    | Ban
    | Note
    | Finish
)

Event: TypeAlias = (
    Joined
    | Left
    | Answered
    | Measured
    | Failed
    | Verified
    | Dropped
    | Unreadable
    | Discovered
    | Called
    | Withdrawn
    | Stepped
    | Undone
    | Evaluated
    | Saved
    | SaveFailed
    | Broke
    | Stop
    | Ticked
)
