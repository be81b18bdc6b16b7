"""Which settings each command has, and where its defaults differ from the schema's. Knows no values."""

from __future__ import annotations

from typing import Any

_TRAINING = [
    "mode",
    "batch_size",
    "batches_per_step",
    "scale_for_batch",
    "staleness",
    "delay_correction",
    "local_steps",
    "round_rate",
    "clip_norm",
    "precision",
    "seed",
    "shuffle",
    "steps",
    "epochs",
    "seconds",
    "evaluate_every",
    "data",
    "cache_bytes",
    "loader_workers",
    "compress",
    "recording",
]
_TRUST = ["max_update_norm", "verify", "robust", "canary"]
_SOCKETS = ["road", "socket_buffer", "tcp_nodelay", "tcp_keepalive", "tcp_quickack"]
_TLS = ["tls_cert", "tls_key", "tls_ca"]
_ENTRANCE = ["host", "port", "advertise", "ticket_file", "insecure", "new_identity", *_TLS]
_PLACE = ["nodes", "device", "threads", *_ENTRANCE, *_SOCKETS]
_RUN = ["resume", "name", "runs"]
_KEEPING = ["checkpoint_every", "keep_checkpoints", "durability", "skip_bad_batches", *_RUN]
_SHOWING = ["log", "json"]
# Settings for one start only: a resumed run does not inherit them.
FOR_ONCE = ["new_identity", *_SHOWING]
COMMAND_SETTINGS: dict[str, list[str]] = {
    "train": [*_TRAINING, *_TRUST, *_PLACE, *_KEEPING, *_SHOWING],
    "serve": [*_TRAINING, *_TRUST, *_PLACE, *_KEEPING, *_SHOWING],
    "join": ["node_name", "device", "wait", "cache_bytes", *_TLS, *_SOCKETS, *_SHOWING],
    "ticket": ["runs", "json"],
    "demo": ["nodes", "name", "runs", *_SHOWING],
    "audit": ["runs", "json"],
    "export": ["runs", "json"],
    "explain": ["json"],
    "doctor": ["host", "port", "runs", "device", "batch_size", "json"],
}
# Defaults of a command that differ from the schema.
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "serve": {"nodes": 0, "port": 5555},
    "demo": {"nodes": 3},
    "doctor": {"port": 5555},
}
