"""Which settings each command has, how help groups them, and which defaults differ. Knows no values."""

from __future__ import annotations

from typing import Any

_TRAINING = [
    "mode",
    "batch_size",
    "batches_per_step",
    "scale_for_batch",
    "clip_norm",
    "precision",
    "seed",
    "shuffle",
    "drop_last",
    "staleness",
    "delay_correction",
    "local_steps",
    "round_rate",
    "plateau_metric",
    "recording",
]
_LENGTH = ["epochs", "steps", "seconds", "evaluate_every", "evaluate"]
_DATA = ["data", "cache_bytes", "loader_workers", "compress"]
_TRUST = ["max_update_norm", "verify", "robust", "canary"]
_MACHINE = ["nodes", "devices", "threads"]
CLUSTER_SETTINGS = ["engine", "cpus_per_node", "gpus_per_node", "labels"]
_SOCKETS = ["road", "socket_buffer", "tcp_nodelay", "tcp_keepalive", "tcp_quickack"]
_TLS = ["tls_cert", "tls_key", "tls_ca"]
_IDENTITY = ["identity", "known_ticket", "insecure", "new_identity", *_TLS]
_ENTRANCE = ["host", "port", "advertise", "ticket_file", "ticket_lifetime", "ticket_uses", *_IDENTITY]
_RUN = ["resume", "name", "runs"]
_KEEPING = [*_RUN, "override", "checkpoint_every", "keep_checkpoints", "durability", "skip_bad_batches"]
_SHOWING = ["log", "json"]
_COORDINATING = [
    *_TRAINING, *_LENGTH, *_DATA, *_MACHINE, "with_parent", "ship", *_ENTRANCE, *_SOCKETS, *_TRUST, *_KEEPING,
    *_SHOWING, "page",
]  # fmt: skip
# Settings of a process, whichever run it works for: every start reads them from all sources.
OF_THE_PROCESS = ["with_parent", *CLUSTER_SETTINGS, *_SHOWING]
# Settings for one start only: a resumed run does not inherit them.
FOR_ONCE = ["new_identity", "override", "page", *OF_THE_PROCESS]
COMMAND_SETTINGS: dict[str, list[str]] = {
    "train": [*_COORDINATING, *CLUSTER_SETTINGS],
    "serve": _COORDINATING,
    "join": [
        "nodes",
        "devices",
        "node_name",
        "with_parent",
        "accept_code",
        "wait",
        "cache_bytes",
        "loader_workers",
        *_TLS,
        *_SOCKETS,
        *_SHOWING,
    ],
    # No command of the command line, but the settings of `w5xde.Pool`.
    "pool": [
        "seed",
        "precision",
        "compress",
        "recording",
        "verify",
        "canary",
        *_MACHINE,
        *_ENTRANCE,
        *_SOCKETS,
        "log",
    ],
    "ticket": ["runs", "json"],
    "demo": ["nodes", "name", "runs", *_SHOWING, "page"],
    "audit": ["runs", "json"],
    "export": ["runs", "json"],
    "show": ["runs", "json"],
    "explain": ["json"],
    "doctor": ["host", "port", "runs", "devices", "batch_size", "json"],
}
# Defaults of a command that differ from the schema.
COMMAND_DEFAULTS: dict[str, dict[str, Any]] = {
    "serve": {"nodes": 0, "port": 5555},
    "demo": {"nodes": 3},
    "doctor": {"port": 5555},
}
# The groups in which help shows settings, in this order.
GROUPS: dict[str, list[str]] = {
    "how to train": _TRAINING,
    "how long": _LENGTH,
    "data": _DATA,
    "this machine": [*_MACHINE, "node_name", "with_parent"],
    "the cluster": CLUSTER_SETTINGS,
    "code that comes with the run": ["ship", "accept_code"],
    "the network": [*_ENTRANCE, "wait", *_SOCKETS],
    "trust": _TRUST,
    "the run": _KEEPING,
    "output": [*_SHOWING, "page"],
}
# The settings that most people use; help shows the others only if it is asked for all.
COMMON = {
    "mode", "batch_size", "batches_per_step", "epochs", "steps", "data", "nodes", "devices", "threads",
    "engine", "node_name", "accept_code", "wait", "host", "resume", "name", "json", "page",
}  # fmt: skip
# A command with no more settings than this shows all of them.
FEW_SETTINGS = 8
