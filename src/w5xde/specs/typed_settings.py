"""The settings of the Python interface, with their types, so that editors and type checkers know them.

Written out, because type checkers read no schema; `tests/test_typed_settings.py` compares it with the schema.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class CoordinatorSettings(TypedDict, total=False):
    """Keyword arguments that `w5xde.train` and `w5xde.serve` have in common, besides `nodes`."""

    mode: Literal["sync", "async", "rounds"]
    batch_size: int | None
    batches_per_step: int | None
    scale_for_batch: bool
    clip_norm: float | None
    precision: Literal["fp32", "bf16"]
    seed: int
    shuffle: bool | None
    drop_last: bool | None
    staleness: int | None
    delay_correction: bool
    local_steps: int | str | None
    round_rate: float | None
    plateau_metric: str | None
    recording: Literal["auto", "off"]
    epochs: int | None
    steps: int | None
    seconds: float | None
    evaluate_every: int | None
    evaluate: Literal["wait", "skip"]
    data: Literal["stream", "cached", "local", "auto"]
    cache_bytes: int
    loader_workers: int | None
    compress: str
    devices: str
    threads: int
    with_parent: bool
    ship: str | None
    host: str
    port: int
    advertise: str | None
    ticket_file: str | None
    ticket_lifetime: str
    ticket_uses: int | str
    identity: str | None
    known_ticket: str | None
    insecure: bool
    new_identity: bool
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    road: Literal["auto", "shared", "unix", "tcp"]
    socket_buffer: int
    tcp_nodelay: bool
    tcp_keepalive: bool
    tcp_quickack: bool
    max_update_norm: float | str
    verify: float
    robust: str
    canary: bool
    resume: str | None
    name: str | None
    runs: str
    override: str | None
    checkpoint_every: str
    keep_checkpoints: int
    durability: Literal["checkpoint", "step"]
    skip_bad_batches: bool
    log: Literal["silent", "normal", "verbose"]
    json: bool
    page: bool


class TrainSettings(CoordinatorSettings, total=False):
    """Keyword arguments of `w5xde.train`, besides `nodes`."""

    engine: Literal["local", "ray"]
    cpus_per_node: float | None
    gpus_per_node: float
    labels: str | None


class ServeSettings(CoordinatorSettings, total=False):
    """Keyword arguments of `w5xde.serve`."""

    nodes: int | str


class JoinSettings(TypedDict, total=False):
    """Keyword arguments of `w5xde.join`."""

    nodes: int | str
    devices: str
    node_name: str | None
    with_parent: bool
    accept_code: str | None
    wait: float | str
    cache_bytes: int
    loader_workers: int | None
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    road: Literal["auto", "shared", "unix", "tcp"]
    socket_buffer: int
    tcp_nodelay: bool
    tcp_keepalive: bool
    tcp_quickack: bool
    log: Literal["silent", "normal", "verbose"]
    json: bool
