"""Settings: one schema, four doors (flags, `W5XDE_*`, `w5xde.toml`, Python arguments).

What makes no sense is rejected here, before a socket opens. Knows no torch, so `--help` is instant.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from w5xde.errors import UsageError
from w5xde.messages import NODE_NAME_PATTERN

SETTINGS_FILE = "w5xde.toml"
ENVIRONMENT_PREFIX = "W5XDE_"

# A run's name is also a folder's name; both kinds of names are shown in terminals and logs.
SHOWN_NAME = re.compile(NODE_NAME_PATTERN)

Positive = Annotated[int, Meta(ge=1)]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, with its default. The descriptions are the help texts."""

    # --- how to train
    mode: Annotated[
        Literal["sync", "async"],
        Meta(description="sync: same bits whoever helps; async: each update is applied as it comes"),
    ] = "sync"
    batch_size: Annotated[int, Meta(ge=1, description="samples in a batch")] = 32
    batches_per_step: Annotated[
        int | None, Meta(description="batches in an optimizer step (default: 8 in sync mode, 1 in async)")
    ] = None
    staleness: Annotated[
        int, Meta(ge=0, description="async: refuse an update computed more than this many steps ago")
    ] = 16
    clip_norm: Annotated[float | None, Meta(description="clip the gradient of a step to this norm")] = None
    precision: Annotated[
        Literal["fp32", "bf16"], Meta(description="bf16: run the loss under bfloat16 autocast on the nodes")
    ] = "fp32"
    seed: Annotated[
        int, Meta(ge=0, le=2**62, description="fixes initial weights, batch order and dropout")
    ] = 0
    shuffle: Annotated[bool, Meta(description="a new order of samples in each epoch")] = True
    # --- how long
    steps: Annotated[Positive | None, Meta(description="stop after this many optimizer steps")] = None
    epochs: Annotated[
        Positive | None, Meta(description="stop after this many passes over the data (default: 10)")
    ] = None
    seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="stop after this many seconds of training")
    ] = None
    evaluate_every: Annotated[
        Positive | None, Meta(description="steps between evaluations (default: once an epoch and at the end)")
    ] = None
    # --- data
    data: Annotated[
        Literal["stream", "local"],
        Meta(description="stream: the coordinator sends batches; local: each node reads its own copy"),
    ] = "stream"
    loader_workers: Annotated[
        int, Meta(ge=0, le=64, description="processes that read batches ahead (0: read in the coordinator)")
    ] = 0
    # --- where and who
    nodes: Annotated[int, Meta(ge=0, le=1000, description="node processes to start on this machine")] = 2
    host: Annotated[str, Meta(min_length=1, description="address to listen on (0.0.0.0: every network)")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on (0: any free one)")] = 0
    device: Annotated[str, Meta(description="auto, cpu, cuda, cuda:N, mps or xpu")] = "auto"
    threads: Annotated[
        int,
        Meta(ge=1, le=1024, description="torch threads in each node; the same everywhere, or bits differ"),
    ] = 1
    node_name: Annotated[str | None, Meta(description="name of this node (default: the host's)")] = None
    wait: Annotated[
        float, Meta(ge=0, description="seconds to keep trying while nothing answers at first")
    ] = 5.0
    # --- what is kept and shown
    name: Annotated[str | None, Meta(description="name of the run (default: a new one)")] = None
    runs: Annotated[str, Meta(description="folder in which runs are kept")] = "runs"
    log: Annotated[Literal["silent", "normal", "verbose"], Meta(description="how much is shown")] = "normal"
    json: Annotated[bool, Meta(description="print one JSON object with the results on stdout")] = False

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

    @property
    def step_batches(self) -> int:
        """Batches in a step: what was asked for, or what suits the mode."""
        return self.batches_per_step or (8 if self.mode == "sync" else 1)

    @property
    def epoch_limit(self) -> int | None:
        """How many epochs at most; ten if nothing else says when to stop."""
        if self.epochs is None and self.steps is None and self.seconds is None:
            return 10
        return self.epochs


_TRAINING = [
    "mode",
    "batch_size",
    "batches_per_step",
    "staleness",
    "clip_norm",
    "precision",
    "seed",
    "shuffle",
    "steps",
    "epochs",
    "seconds",
    "evaluate_every",
    "data",
    "loader_workers",
]
_SHOWING = ["log", "json"]
COMMAND_SETTINGS: dict[str, list[str]] = {
    "train": [*_TRAINING, "nodes", "device", "threads", "host", "port", "name", "runs", *_SHOWING],
    "serve": [*_TRAINING, "nodes", "device", "threads", "host", "port", "name", "runs", *_SHOWING],
    "join": ["node_name", "device", "wait", *_SHOWING],
    "demo": ["nodes", "name", "runs", *_SHOWING],
}
# What a command takes when nobody says otherwise, where that differs from the schema.
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {},
    "serve": {"nodes": 0, "port": 5555},
    "join": {},
    "demo": {"nodes": 3},
}


def field_types() -> dict[str, Any]:
    """The annotated type of each setting, for building flags and help."""
    return get_type_hints(Settings, include_extras=True)


def resolve(
    command: str,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """Settings of a command: arguments first, then `W5XDE_*`, then `w5xde.toml`, then defaults."""
    known = list(Settings.__struct_fields__)
    for key in arguments:
        _require_known(key, known, "unknown setting {!r}")
    merged = dict(COMMAND_DEFAULTS[command])
    wanted = set(COMMAND_SETTINGS[command])
    layers = [
        ("w5xde.toml", _read_file(folder, known)),
        ("the environment", _read_environment(environment or {}, known)),
        ("", {key: value for key, value in arguments.items() if value is not None}),
    ]
    for origin, layer in layers:
        relevant = {key: value for key, value in layer.items() if key in wanted or not origin}
        if relevant:
            _convert({**merged, **relevant}, origin)
            merged.update(relevant)
    return _convert(merged, "")


def _convert(values: dict[str, Any], origin: str) -> Settings:
    try:
        # Flags and variables are text, and TOML may say 5 where a float is meant: hence not strict.
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        text = re.sub(r" - at `\$\.(\w+)`", lambda m: f" for {m[1].replace('_', '-')}", str(error))
        where = f" in {origin}" if origin else ""
        raise UsageError(
            f"{text}{where}", code="W5-210", fix="w5xde train --help lists every setting"
        ) from None


def _require_known(key: str, known: list[str], sentence: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f". Did you mean {near[0].replace('_', '-')!r}?" if near else ""
    fix = "" if near else "w5xde train --help lists every setting"
    raise UsageError(sentence.format(key) + hint, code="W5-210", fix=fix)


def _read_environment(environment: Mapping[str, str], known: list[str]) -> dict[str, Any]:
    layer = {}
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            _require_known(key, known, f"unknown setting {variable} in the environment ({{!r}})")
            layer[key] = value
    return layer


def _read_file(folder: Path | None, known: list[str]) -> dict[str, Any]:
    if folder is None or not (path := folder / SETTINGS_FILE).is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{SETTINGS_FILE} cannot be read: {error}", code="W5-210") from None
    layer = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        _require_known(name, known, f"unknown setting {key!r} in {SETTINGS_FILE}")
        layer[name] = value
    return layer
