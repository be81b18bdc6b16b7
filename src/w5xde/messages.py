"""The messages on the wire, as frozen, typed structures.

Each message is a small MessagePack map tagged with its name; tensors travel beside it as raw bytes (the
*body*), described here by offset, dtype and shape. `docs/protocol.md` describes the conversation. Knows no
sockets, no torch (a dtype is its name), and not when a message is legal.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, field

from w5xde.message_types import (
    ANSWERS_MAX,
    ENTRIES_MAX,
    MISSING_BYTES_MAX,
    Call,
    CodeReference,
    CodeSizes,
    Count,
    Digest,
    Fill,
    Frozen,
    ImportedModules,
    Item,
    Label,
    LossNames,
    MetricNames,
    MetricRows,
    NodeName,
    ProbeBytes,
    Proof,
    SampleList,
    Sha256,
    Shape,
    Spoken,
    StepRates,
    Text,
    Versions,
)
from w5xde.sanitize import harmless

PROTOCOL_VERSION = 3

# --- a batch, described -------------------------------------------------------------------------


class Batch(Frozen, frozen=True, array_like=True):
    """One batch of a lease: its index in the epoch, its samples, and its bytes from `at` of the body on."""

    index: Count
    samples: Count
    at: Count
    item: Item
    listed: SampleList | None = None


# --- the model, described -----------------------------------------------------------------------

TRAINED: Final = "trained"
FROZEN: Final = "frozen"
MOVING: Final = "moving"
STILL: Final = "still"
# Statistics of the optimizer, in updates of rounds mode alone; `carried` ones are never negative.
CARRIED: Final = "carried"
AVERAGED: Final = "averaged"
Role: TypeAlias = Literal["trained", "frozen", "moving", "still", "carried", "averaged"]


class Entry(Frozen, frozen=True, array_like=True):
    """One parameter (`trained`, `frozen`), buffer (`moving`, `still`) or statistic of the optimizer."""

    name: Label
    dtype: Label
    shape: Shape
    role: Role


class Layout(Frozen, frozen=True):
    """All parameters and buffers, in the order of the model."""

    entries: Annotated[list[Entry], Meta(max_length=ENTRIES_MAX)]

    def digest(self) -> str:
        return hashlib.sha256(msgspec.msgpack.encode(self.entries)).hexdigest()


class Canary(Frozen, frozen=True, array_like=True):
    """A batch that a node computes before it gets work, and a formula for the weights to compute it on.

    `fills` has one item for each entry of the layout. In the body: the moving buffers, then the batch.
    """

    fills: list[Fill | None]
    item: Item
    call: Call | None = None


# --- greeting -----------------------------------------------------------------------------------


class Hello(Spoken, frozen=True, tag="hello"):
    """Node: this is my name, version and machine. The first message of every connection."""

    protocol: int
    package: Label
    name: NodeName
    run: Label = ""
    device: Label = "cpu"
    torch: Label = ""
    # Nodes on one machine share its cores, and take turns if they compute there and are more than the cores.
    machine: Label = ""
    cores: Count = 0
    # An id and a secret that admit the node: those of its credential, else of its ticket.
    ticket: Proof = b""
    credential: Proof = b""
    # A local node: it has mapped the memory that the coordinator shares with it.
    shares: bool = False
    # Only a check of the connection: the ticket is checked but not used up, and Ready is not allowed.
    looks: bool = False
    # Then, to measure the link: bytes that come with the Welcome; as many may go with a Ready, all the same.
    probe: ProbeBytes = 0
    # Of a node that only looks: it wants the job's code, and the answer is an Offer instead of a Welcome.
    asks_code: bool = False


class Rules(Frozen, frozen=True):
    """The rules that all nodes of a run follow."""

    mode: Literal["sync", "async", "rounds"]
    seed: Count
    precision: Literal["fp32", "bf16"]
    threads: Annotated[int, Meta(ge=1, le=1024)]
    data: Literal["stream", "local", "cached"]
    # How nodes encode updates: a spec, or `auto` to choose by measurements.
    compress: Label = "none"
    # Whether nodes may record the kernels of a batch: `auto` or `off`.
    recording: Literal["auto", "off"] = "off"
    # Which of Python's and numpy's global generators the loss draws from; seeding costs time, so only these.
    seeds_python: bool = False
    seeds_numpy: bool = False
    # Fingerprint of the data set, for nodes that read their own copy or keep samples.
    data_samples: Count = 0
    data_digest: Label = ""
    # Bytes of a sample, for nodes that keep samples.
    sample_bytes: Count = 0
    # What a weight of one is counted as, in a job that weighs its batches: about the weight of a sample. 0: a
    # batch weighs what it has samples.
    weight_unit: float = 0.0
    # In rounds mode: how the optimizer's state goes from round to round, and the norm to which nodes clip the
    # gradient of each step (0: they do not clip).
    hand_over: Annotated[str, Meta(max_length=1000)] = ""
    clip_norm: float = 0.0
    # How many optimizer steps the run has, for losses that ask; None: that is not known.
    steps: Count | None = None
    # In a pool: the names of its losses; every Work then has a `call`.
    losses: LossNames = field(default_factory=list)
    # What nodes measure in each batch of a validation set, in this order.
    metrics: MetricNames = field(default_factory=list)
    # If nodes read their own data: the number of samples of the validation set, and its fingerprint.
    validation_samples: Count = 0
    validation_digest: Label = ""


class Welcome(Spoken, frozen=True, tag="welcome"):
    """Coordinator: you may join, and your model must match this layout."""

    run: Label
    incarnation: Count
    name: NodeName
    layout: Layout
    rules: Rules
    # For later connections; sent once, to a node that joined by a ticket.
    credential: Proof = b""
    # To compute before the node gets work.
    canary: Canary | None = None
    # The hash of the code that an Offer has, empty if none is offered; and the versions that the run uses.
    code: Sha256 = ""
    versions: Versions = field(default_factory=dict)


class Offer(Frozen, frozen=True, tag="offer"):
    """Coordinator: the code of the job, for a node that asked for it. The body is the files in this order."""

    # The job file, and the name of the job in it if one was given: `train.py` or `train.py:small`.
    job: CodeReference
    files: CodeSizes
    # The hash of the names and contents of all files, and of `job`.
    sha256: Sha256
    # Modules that the files import and that are not among them.
    imports: ImportedModules = field(default_factory=dict)
    versions: Versions = field(default_factory=dict)
    # Whether each node reads its own copy of the data.
    reads_data: bool = False


class Ready(Frozen, frozen=True, tag="ready"):
    """Node: my model and data match, and I am ready for work.

    In the body: a sketch of its canary gradients, and a bit for each slot of its cache, if it has one.
    """

    layout_digest: Label
    # Seconds to compute the canary.
    seconds: float = 0.0
    # Bytes a second at which the canary arrived; 0: too small to measure.
    link: float = 0.0
    # The id of its cache, and how many samples it has room for: those with the lowest numbers.
    cache: Digest = b""
    cache_slots: Count = 0
    # In rounds mode, of a node that comes back: the version of its parameters, and their hash.
    version: Count = 0
    replica: Digest = b""
    # Those of its versions that are not the coordinator's.
    versions: Versions = field(default_factory=dict)


class Refuse(Spoken, frozen=True, tag="refuse"):
    """Coordinator: you may not join, and why. The connection closes."""

    code: Label
    what: Text
    why: Text = ""
    fix: Text = ""


# --- work ---------------------------------------------------------------------------------------


class Params(Frozen, frozen=True, tag="params"):
    """Coordinator: the parameters and buffers of a version; `whole` includes those that never change."""

    version: Count
    whole: bool
    codec: Label = "none"


class Difference(Frozen, frozen=True, tag="difference"):
    """Coordinator, in rounds mode: what the round from version `after` to `version` changed.

    In the body: the change of the trained parameters, the moving buffers as they are now, and the statistics
    of the round. A node adds it to its parameters, whose hash must then be `replica`. If not `adds`, the
    parameters that were just sent contain it already, and the statistics are those of all rounds.
    """

    after: Count
    version: Count
    codec: Label
    replica: Digest
    adds: bool = True


class Loan(Frozen, frozen=True, array_like=True):
    """A lease as the node sees it: batches `start..stop` of a step of `count` batches, `samples` in all.

    If it is `apart`, the node makes an optimizer step of its own with each batch. In rounds mode it is column
    `start` of a round of `count` columns, and the node makes a step with each batch. `step`: how many steps
    are planned before it, or before the first of them. If it `validates`, its batches are of a validation set
    of `count` batches, and the node only measures them.
    """

    lease: Count
    epoch: Count
    start: Count
    stop: Count
    count: Count
    samples: Count
    batches: list[Batch]
    apart: bool = False
    step: Count = 0
    validates: bool = False


class Work(Frozen, frozen=True, tag="work"):
    """Coordinator: compute these on that version. One Work is answered by one Update."""

    version: Count
    loans: Annotated[list[Loan], Meta(min_length=1, max_length=ANSWERS_MAX)]
    # Bytes a second at which updates of this node arrive; 0: not measured yet.
    link: float = 0.0
    # Report the squared norm of each batch's gradient.
    measures: bool = False
    # In rounds mode.
    rates: StepRates | None = None
    # How many batches of this connection's answers are in steps that were made.
    counted: Count = 0
    # In a pool.
    call: Call | None = None


class Answer(Frozen, frozen=True, array_like=True):
    """The result of one lease. Its vector is in the body, in the order of the answers; a failure has none.

    An encoded vector takes `body_bytes` of the body, any other as many as the layout says. That of a lease
    that is `apart` is the difference that all steps of the node made, and is not encoded.
    """

    lease: Count
    loss_sum: float = 0.0
    seconds: float = 0.0
    # Trained entries that no batch of this lease gave a gradient (a plain loop leaves their .grad at None).
    absent: list[int] = field(default_factory=list)
    dropped: bool = False
    failure: Text = ""
    codec: Label = "none"
    body_bytes: Count = 0
    # For a lease that is dropped because samples are not in the node's cache: a bit for each sample of the
    # lease, the lowest first. Samples beyond the last bit are missing too.
    missing: Annotated[bytes, Meta(max_length=MISSING_BYTES_MAX)] = b""
    # For a lease that validates, which has no vector: what was measured in each batch.
    metrics: MetricRows = field(default_factory=list)

    def __post_init__(self) -> None:
        # Answers are frequent and failures rare.
        if self.failure:
            msgspec.structs.force_setattr(self, "failure", harmless(self.failure))


class Update(Frozen, frozen=True, tag="update"):
    """Node: the answers to one Work, and where its time went since the last one."""

    version: Count
    answers: Annotated[list[Answer], Meta(max_length=ANSWERS_MAX)]
    waited_seconds: float = 0.0
    # The part of the seconds of its answers that it was on a core.
    core_seconds: float = 0.0
    # Encoding and decoding; and sending and receiving, from the first byte to the last.
    codec_seconds: float = 0.0
    network_seconds: float = 0.0
    # Bytes a second at which parameters and batches arrive at the node; 0: not measured yet.
    link: float = 0.0
    # Whether the samples that came with the Work are in the node's cache now, as far as it has room.
    stored: bool = False
    # If the Work `measures` and every answer has a vector: the squared norm of each batch's gradient.
    squares: Annotated[list[float], Meta(max_length=ANSWERS_MAX)] = field(default_factory=list)
    # In rounds mode: the node's parameters are not the coordinator's, so it computed nothing.
    differs: bool = False
    # If the job weighs its batches: for each answer the sum of their weights, counted in the unit of the
    # rules; 0 for an answer without a vector. `loss_sum` is then each batch's mean loss times its weight.
    weights: Annotated[list[float], Meta(max_length=ANSWERS_MAX)] = field(default_factory=list)


class Cancel(Frozen, frozen=True, tag="cancel"):
    """Coordinator: these leases are no longer needed."""

    leases: Annotated[list[Count], Meta(max_length=64 * ANSWERS_MAX)]


class Rejected(Spoken, frozen=True, tag="rejected"):
    """Coordinator: this answer was rejected, and why."""

    lease: Count
    reason: Text


class Beat(Frozen, frozen=True, tag="beat"):
    """Either side: I am alive. Any other message says so too."""


class Leave(Spoken, frozen=True, tag="leave"):
    """Node: I leave. The coordinator shows the reason, if there is one."""

    reason: Text = ""


class Bye(Spoken, frozen=True, tag="bye"):
    """Coordinator: the run has ended, or you are evicted; `stopped`: it ended before it was over."""

    reason: Text
    finished: bool
    stopped: bool = False
    counted: Count = 0


FromNode: TypeAlias = Hello | Ready | Update | Beat | Leave
FromCoordinator: TypeAlias = (
    Welcome | Offer | Refuse | Params | Difference | Work | Cancel | Rejected | Beat | Bye
)
Message: TypeAlias = FromNode | FromCoordinator
