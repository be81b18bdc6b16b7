"""Settings: one schema for all commands, and the settings of each command.

Refuses values that make no sense before a socket opens. Knows no torch, so that `--help` is instant, and not
where values come from: `setting_sources.py` does.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from w5xde.compression import Directions, parse_compress
from w5xde.message_types import NODE_NAME_PATTERN
from w5xde.runs import AUTO
from w5xde.specs.code_settings import AcceptCode, Ship, require_accept_code
from w5xde.specs.data_settings import (
    BATCH_SAMPLES,
    BatchSize,
    CacheBytes,
    DataMode,
    DropLast,
    LoaderWorkers,
    Shuffle,
)
from w5xde.specs.durations import Wait, parse_duration, parse_wait
from w5xde.specs.engine_settings import CpusPerNode, Engine, GpusPerNode, Labels, Nodes, require_engine
from w5xde.specs.rate_override import RateOverride
from w5xde.specs.robust_rule import Robust, RobustSetting, parse_robust, require_robust
from w5xde.specs.round_lengths import RoundLengths
from w5xde.specs.round_settings import (
    ROUND_COLUMNS,
    ROUNDS,
    require_local_steps,
    round_directions,
    round_lengths,
)
from w5xde.specs.run_settings import RunSettings, parse_lifetime, parse_uses, require_known_ticket
from w5xde.specs.setting_error import SettingError

# The name of a run is also the name of its folder; names of runs and nodes appear in terminals and logs.
SHOWN_NAME = re.compile(NODE_NAME_PATTERN)

NORM = re.compile(r"auto|off|(?=[^e]*[1-9])\d*\.?\d+(e[+-]?\d\d?)?")
_EVERY_STEPS = re.compile(r"(\d{1,9})steps", re.ASCII)

Positive = Annotated[int, Meta(ge=1)]
# The default of sync mode does not depend on the nodes, because it decides the bits. Two batches are best for
# up to three nodes of one speed; four or more nodes need more (docs/decisions/0017-batches-a-step.md).
SYNC_STEP_BATCHES = 2


def parse_every(text: str) -> tuple[float | None, int | None]:
    """The interval of checkpoints, `30s`, `5m`, `500steps` or `off`, as (seconds, steps)."""
    if text == "off":
        return None, None
    steps = _EVERY_STEPS.fullmatch(text)
    try:
        # A plain number could mean either.
        value = int(steps[1]) if steps is not None else parse_duration(text) if text[-1:].isalpha() else 0
    except ValueError:
        value = 0
    if not value:
        raise ValueError(f"checkpoint-every {text!r} must be like 30s, 5m, 500steps or off")
    return (None, int(value)) if steps is not None else (float(value), None)


class TrainingSchema(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that say what is trained, and for how long. The descriptions are the help texts."""

    # --- how to train
    mode: Annotated[
        Literal["sync", "async", "rounds"],
        Meta(
            description="sync: the same bits whichever nodes help; async: apply each update as it arrives;"
            " rounds: for slow links, nodes make several steps before they talk, still with the same bits"
        ),
    ] = "sync"
    batch_size: BatchSize = None
    batches_per_step: Annotated[
        int | None,
        Meta(
            description="batches in an optimizer step, whatever the number of nodes (default: 2 in sync mode,"
            " with robust as many as that needs nodes, 1 in async, 4 in rounds). 1: steps as in a plain loop;"
            " for more nodes give their number, in rounds twice that"
        ),
    ] = None
    scale_for_batch: Annotated[
        bool,
        Meta(
            description="sync: the job's learning rate is meant for steps of one batch: for K batches a step"
            " multiply it by √K, and raise the betas of Adam to the power of K (K up to 8; SGD: 16)"
        ),
    ] = False
    staleness: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="async: an update counts if at most this many others came before it since its weights"
            " (default: one fewer than the nodes that can compute at once, at least 2). More keeps fast nodes"
            " busy and teaches less; beyond 6 use sync"
        ),
    ] = None
    delay_correction: Annotated[
        bool,
        Meta(
            description="async: nodes compute on weights that look ahead by as many updates as theirs come"
            " late, if the optimizer has momentum, and late updates make smaller steps"
        ),
    ] = True
    local_steps: Annotated[
        int | str | None,
        Meta(
            description="steps that a node makes before it talks. rounds: grow (default: 2 at first, one more"
            " every 50 steps, up to 20), a number (constant), auto (grow up to what the link needs, measured"
            " at the start), @RUN (as in that run). async: on (default: tiny models only) or off"
        ),
    ] = None
    round_rate: Annotated[
        float | None,
        Meta(
            description="rounds: a factor on the job's learning rate, because the steps of several nodes are"
            " averaged (default: 1.5 for Adam and AdamW, else 1)"
        ),
    ] = None
    clip_norm: Annotated[float | None, Meta(description="clip the gradient of a step to this norm")] = None
    max_update_norm: Annotated[
        float | str,
        Meta(
            description="reject updates beyond this norm: auto (ten times the usual norm), off, or a number"
        ),
    ] = "auto"
    verify: Annotated[
        float,
        Meta(
            ge=0, le=1, description="share of the work that is computed again here, to find nodes that cheat"
        ),
    ] = 0.0
    canary: Annotated[
        bool, Meta(description="compare a small gradient of every node with our own before it gets work")
    ] = True
    robust: RobustSetting = "off"
    precision: Annotated[
        Literal["fp32", "bf16"], Meta(description="bf16: run the loss under bfloat16 autocast on the nodes")
    ] = "fp32"
    seed: Annotated[
        int, Meta(ge=0, le=2**62, description="fixes initial weights, batch order and dropout")
    ] = 0
    shuffle: Shuffle = None
    drop_last: DropLast = None
    # --- how long
    steps: Annotated[Positive | None, Meta(description="stop after this many optimizer steps")] = None
    epochs: Annotated[
        Positive | None, Meta(description="stop after this many passes over the data (default: 10)")
    ] = None
    seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="stop after this many seconds of training")
    ] = None
    # --- data
    data: DataMode = "stream"
    cache_bytes: CacheBytes = 2**30
    loader_workers: LoaderWorkers = None
    compress: Annotated[
        str,
        Meta(
            description="compression of what is sent: auto (lossless, if the link is slow enough),"
            " auto:lossy, none, codecs like zstd:1 or 'bf16 | lz4', or by direction: 'up: int8, down: lz4'"
        ),
    ] = "auto"
    recording: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto: nodes record the kernels of a small model's batch and then skip its Python,"
            " where that gives the same bits"
        ),
    ] = "auto"


class PlaceSchema(TrainingSchema, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """And those that say where: machines, networks and files."""

    # --- machines and networks
    engine: Engine = "local"
    nodes: Nodes = "auto"
    cpus_per_node: CpusPerNode = None
    gpus_per_node: GpusPerNode = 0.0
    labels: Labels = None
    host: Annotated[
        str, Meta(min_length=1, description="address to listen on (0.0.0.0 or auto: every network)")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on (0: any free one)")] = 0
    advertise: Annotated[
        str | None, Meta(description="hosts that tickets name, with commas (default: this machine's own)")
    ] = None
    ship: Ship = None
    ticket_file: Annotated[
        str | None, Meta(description="write the ticket into this file, which only its owner can read")
    ] = None
    insecure: Annotated[
        bool, Meta(description="let other machines join without encryption, so that the network can read all")
    ] = False
    new_identity: Annotated[
        bool, Meta(description="a new certificate and new tickets: every node has to join again")
    ] = False
    tls_cert: Annotated[
        str | None, Meta(description="a certificate of your own (PEM), instead of the run's own")
    ] = None
    tls_key: Annotated[str | None, Meta(description="the key of that certificate (PEM)")] = None
    tls_ca: Annotated[
        str | None, Meta(description="the authority (PEM) that signed the certificate of the other side")
    ] = None
    road: Annotated[
        Literal["auto", "shared", "unix", "tcp"],
        Meta(
            description="how nodes on the coordinator's machine reach it. shared: nodes that it starts share"
            " memory with it, for models from 64 KiB on; unix: all use a Unix socket; tcp: all use TCP;"
            " auto: shared, where the system can"
        ),
    ] = "auto"
    socket_buffer: Annotated[
        int, Meta(ge=0, le=2**30, description="bytes of each socket's buffers (0: the system adapts them)")
    ] = 0
    tcp_nodelay: Annotated[bool, Meta(description="send small messages at once")] = True
    tcp_keepalive: Annotated[bool, Meta(description="let the system probe silent connections")] = True
    tcp_quickack: Annotated[bool, Meta(description="acknowledge data as soon as it arrives")] = False
    devices: Annotated[
        str,
        Meta(
            description="where nodes compute: auto (every GPU of this machine, each with a node of its own;"
            " without one, the CPU), or a list of cpu, cuda, cuda:N, mps and xpu with commas"
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="torch threads in each node; the same number everywhere, or bits differ. With more,"
            " fewer nodes fit: 8 cores are 8 nodes of 1 thread, or 2 of 4",
        ),
    ] = 1
    node_name: Annotated[str | None, Meta(description="name of this node (default: the host's)")] = None
    with_parent: Annotated[
        bool,
        Meta(
            description="end, as after SIGTERM, when the process that started this one has ended, also if it"
            " was killed"
        ),
    ] = False
    accept_code: AcceptCode = None
    wait: Wait = 5.0
    # --- output
    log: Annotated[Literal["silent", "normal", "verbose"], Meta(description="how much is shown")] = "normal"
    json: Annotated[bool, Meta(description="print one JSON object with the results on stdout")] = False


class Settings(PlaceSchema, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings with their defaults, checked together."""

    def __post_init__(self) -> None:
        for name in (self.name, self.node_name):
            if name is not None and not SHOWN_NAME.match(name):
                raise ValueError(
                    f"name {name!r} must be letters, digits, dots, dashes or underscores (at most 64)"
                )
        if self.batches_per_step is not None and not 1 <= self.batches_per_step <= 65536:
            raise ValueError(f"batches-per-step {self.batches_per_step} must be from 1 to 65536")
        if self.clip_norm is not None and not 0 < self.clip_norm < float("inf"):
            raise ValueError(f"clip-norm {self.clip_norm} must be a positive number")
        if not NORM.fullmatch(str(self.max_update_norm)):
            raise ValueError(f"max-update-norm {self.max_update_norm} must be auto, off or a positive number")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingError("tls-cert and tls-key go together", fix="give both, or none")
        require_known_ticket(self.known_ticket, self.identity)
        if self.scale_for_batch and self.mode != "sync":
            raise SettingError(
                f"scale-for-batch is for steps of several batches in mode sync, and in mode {self.mode} nodes"
                " make steps of one batch",
                fix="use mode sync, or set the rate in the job",
            )
        require_robust(self.robust, self.mode, lambda: self.step_batches)
        require_local_steps(self.mode, self.local_steps, self.round_rate)
        require_accept_code(self.accept_code)
        require_engine(self.engine, self.nodes, self.labels, self.cpus_per_node, self.gpus_per_node)
        parse_every(self.checkpoint_every)
        parse_wait(self.wait)
        parse_lifetime(self.ticket_lifetime)
        parse_uses(self.ticket_uses)
        if self.override is not None:
            RateOverride.parse(self.override)
            if self.resume is None:
                raise SettingError(
                    "override changes a run that is resumed", fix="add resume, or set lr in the job"
                )
        _ = self.directions
        if self.durability == "step" and self.checkpoint_every == "off":
            raise SettingError(
                "durability step needs checkpoints, and checkpoint-every is off",
                fix="leave out one of the two",
            )

    @property
    def goes_on(self) -> bool:
        """Whether an earlier run is continued; with `resume auto` only once that run exists."""
        return self.resume not in (None, AUTO)

    @property
    def node_count(self) -> int | None:
        """The number of nodes that the user wants on this machine; None: as many as fit."""
        return self.nodes if isinstance(self.nodes, int) else None

    @property
    def robust_rule(self) -> Robust | None:
        """The rule of the robust mean; None if `robust` is off."""
        return parse_robust(self.robust)

    @property
    def wait_seconds(self) -> float:
        """How long a node looks for its coordinator at first; infinite: for ever."""
        return parse_wait(self.wait)

    @property
    def save_seconds(self) -> float | None:
        """Seconds between two checkpoints, if they go by time."""
        return parse_every(self.checkpoint_every)[0]

    @property
    def save_steps(self) -> int | None:
        """Steps between two checkpoints, if they go by steps."""
        return parse_every(self.checkpoint_every)[1]

    @property
    def directions(self) -> Directions:
        """The compression of each direction; in mode rounds always a spec, because it decides the bits."""
        return round_directions(self.compress) if self.mode == ROUNDS else parse_compress(self.compress)

    @property
    def steps_locally(self) -> bool:
        """Async mode: whether nodes may make steps of their own."""
        return self.local_steps != "off"

    @property
    def round_lengths(self) -> RoundLengths | None:
        """How many steps each round has, in mode rounds; with `auto`, as at first."""
        return round_lengths(self.local_steps) if self.mode == ROUNDS else None

    @property
    def batch_samples(self) -> int:
        """Samples in a batch: the setting, or the default."""
        return BATCH_SAMPLES if self.batch_size is None else self.batch_size

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has an order of its own: the setting, or the default."""
        return self.shuffle is not False

    @property
    def drops_last(self) -> bool:
        """Whether a last batch of an epoch that is not full is left out: the setting, or the default."""
        return self.drop_last is True

    @property
    def step_batches(self) -> int:
        """Batches in a step: the setting, or the default of the mode."""
        if self.batches_per_step is not None:
            return self.batches_per_step
        if self.mode == "async":
            return 1
        rule, usual = self.robust_rule, ROUND_COLUMNS if self.mode == ROUNDS else SYNC_STEP_BATCHES
        return usual if rule is None else max(usual, rule.needs)

    @property
    def epoch_limit(self) -> int | None:
        """The limit of epochs; ten if no setting says when to stop, None if only others do."""
        if self.epochs is None and self.steps is None and self.seconds is None:
            return 10
        return self.epochs


def field_types() -> dict[str, Any]:
    """The annotated type of each setting, for building flags and help."""
    return get_type_hints(Settings, include_extras=True)
