"""A row of metrics.jsonl as an object. Fields that rows of earlier versions lack have defaults here."""

from __future__ import annotations

from typing import Any

import msgspec

METRIC = dict[str, float | None]


class NodeRow(msgspec.Struct, frozen=True):
    """One node at one moment; seconds, bytes and batches are totals since it first joined."""

    state: str = "working"
    device: str = ""
    machine: str = ""
    batches: int = 0
    samples: int = 0
    batches_per_second: float = 0.0
    loss: float | None = None
    busy_seconds: float = 0.0
    on_core_seconds: float = 0.0
    wait_seconds: float = 0.0
    network_seconds: float = 0.0
    codec_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    # Steps for which its update was the last one.
    steps_ended: int = 0
    faults: int = 0
    codec_down: str = "none"
    codec_up: str = "none"
    codec_reason: str = ""
    # Bytes a second; None: not measured.
    link_down: int | None = None
    link_up: int | None = None
    round_trip_ms: float | None = None
    leases: int = 0


class MetricsRow(msgspec.Struct, frozen=True):
    """The run at one moment."""

    # The time of day in seconds since 1970, and how often the coordinator was started; 0 in older rows.
    time: float = 0.0
    life: int = 0
    seconds: float = 0.0
    step: int = 0
    steps_total: int | None = None
    epoch: int = 0
    batches: int = 0
    samples: int = 0
    durable_steps: int = 0
    durable_at: float = 0.0
    loss: float | None = None
    loss_min: float | None = None
    loss_max: float | None = None
    loss_last: float | None = None
    learning_rate: float | None = None
    evaluation: METRIC = {}
    evaluation_step: int | None = None
    evaluation_epoch: int | None = None
    samples_per_second: float = 0.0
    batches_per_second: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    batches_relent: int = 0
    batches_aside: int = 0
    load: float = 0.0
    data_ahead: int = 0
    # The share of time in which a lease waited for its data.
    data_behind: float = 0.0
    leases: int = 0
    # How many nodes can compute at once: those that share a core take turns. 0: not known.
    parallel: int = 0
    memory_pss_bytes: int = 0
    node_states: dict[str, int] = {}
    node_facts: dict[str, NodeRow] = {}


def read_row(line: bytes | str) -> MetricsRow | None:
    """The row of a line; None if the line is torn or is no row."""
    try:
        return msgspec.json.decode(line, type=MetricsRow)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def to_row(row: dict[str, Any]) -> MetricsRow:
    """The row that `Callback.on_metrics` was given."""
    return msgspec.json.decode(msgspec.json.encode(row), type=MetricsRow)
