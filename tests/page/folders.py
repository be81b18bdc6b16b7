"""Run folders with fixed contents, as a coordinator leaves them; nothing here trains."""

from __future__ import annotations

import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from w5xde.runtime.durable.sealed_json import NOTHING, seal

BEGAN_AT = 1_795_000_000.0
HASH = "ab" * 32


def node(name: str, seconds: float, **facts: Any) -> dict[str, Any]:
    return {
        "state": "working",
        "device": "cpu",
        "machine": f"m-{name[:5]}",
        "batches": int(20 * seconds),
        "samples": int(640 * seconds),
        "batches_per_second": 20.0,
        "loss": 0.5,
        "busy_seconds": 0.7 * seconds,
        "on_core_seconds": 0.69 * seconds,
        "wait_seconds": 0.3 * seconds,
        "network_seconds": 0.1 * seconds,
        "codec_seconds": 0.02 * seconds,
        "bytes_sent": 1000,
        "bytes_received": 1000,
        "steps_ended": 3,
        "faults": 0,
        "codec_down": "none",
        "codec_up": "zstd:1",
        "codec_reason": "zstd:1: 12 ms instead of 40 ms",
        "link_down": 8_100_000,
        "link_up": 3_900_000,
        "round_trip_ms": 1.25,
        "leases": 1,
        **facts,
    }


def row(at: int, names: tuple[str, ...] = ("gpu-box", "pi-5"), **facts: Any) -> dict[str, Any]:
    """The row after so many quarters of a second."""
    seconds = at / 4
    loss = 2.3 * math.exp(-at / 60) + 0.1
    return {
        "time": BEGAN_AT + seconds,
        "life": 1,
        "seconds": seconds,
        "step": 3 * at,
        "epoch": at // 40,
        "batches": 6 * at,
        "samples": 192 * at,
        "durable_steps": 3 * (at - at % 40),
        "durable_at": BEGAN_AT + (at - at % 40) / 4,
        "loss": loss,
        "loss_min": 0.9 * loss,
        "loss_max": 1.2 * loss,
        "loss_last": loss,
        "learning_rate": 0.01,
        "evaluation": {"accuracy": min(0.99, 0.3 + at / 200)} if at >= 40 else {},
        "evaluation_step": 3 * (at - at % 40) if at >= 40 else None,
        "samples_per_second": 760.0 + 40 * math.sin(at / 9),
        "batches_per_second": 24.0,
        "computing": dict.fromkeys(names, 0.7),
        "nodes": dict.fromkeys(names, at),
        "steps_total": 480,
        "load": 0.31,
        "leases": 2,
        "parallel": 2,
        "node_states": {"working": len(names)},
        "node_facts": {name: node(name, seconds) for name in names},
        **facts,
    }


def line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def add_rows(folder: Path, *rows: dict[str, Any]) -> int:
    """Append rows; returns the size of the file."""
    with (folder / "metrics.jsonl").open("ab") as file:
        for each in rows:
            file.write(line(each))
        return file.tell()


def write_ledger(folder: Path, records: list[dict[str, Any]], number: int = 1) -> None:
    head = {"kind": "segment", "number": number, "after": NOTHING, "records": 0, "life": 1}
    before, lines = NOTHING, []
    for record in [head, *records]:
        sealed, before = seal(json.dumps(record, separators=(",", ":")).encode(), before)
        lines.append(sealed + b"\n")
    (folder / f"ledger-{number:06}.jsonl").write_bytes(b"".join(lines))


RECORDS = [
    {"time": BEGAN_AT, "kind": "start", "run": "fixed", "incarnation": 1},
    {"time": BEGAN_AT + 1, "kind": "joined", "text": "gpu-box joined"},
    {"time": BEGAN_AT + 1.1, "kind": "lend", "node": "pi-5", "version": 0, "leases": [[7, 0, 0, 2]]},
    {"time": BEGAN_AT + 2, "kind": "expired", "node": "pi-5", "leases": [7], "reason": "no answer for 7 s"},
    {"time": BEGAN_AT + 2, "kind": "lend", "node": "gpu-box", "version": 0, "leases": [[8, 0, 0, 2]]},
    {
        "time": BEGAN_AT + 3,
        "kind": "step",
        "step": 0,
        "version": 0,
        "epoch": 0,
        "first": 0,
        "sizes": [[32, 2]],
        "ends_epoch": False,
        "shares": [[0, 2, "gpu-box", 8]],
    },
    {"time": BEGAN_AT + 9, "kind": "left", "text": "old-lap <img src=x onerror=alert(1)> left"},
    {"time": BEGAN_AT + 10, "kind": "checkpoint", "version": 120, "sha256": HASH},
]


def leases(at: float) -> list[dict[str, Any]]:
    """Leases that end in the quarter of a second after this time, of two nodes in turn."""
    found = []
    for number in range(5):
        lent = at + 0.05 * number
        ended = lent + 0.045
        fact = {
            "lease": number,
            "node": ("gpu-box", "pi-5")[number % 2],
            "step": 1,
            "epoch": 0,
            "first": number,
        }
        times = {"lent": lent, "sent": lent + 0.001, "answered": ended - 0.002, "ended": ended}
        rest = {"last": number, "compute_seconds": 0.03, "codec": "none", "outcome": "applied"}
        found.append(fact | times | rest)
    return found


def make_run(runs: Path, name: str = "fixed", *, rows: int = 120, is_over: bool = True, **facts: Any) -> Path:
    """A run with some rows, events and leases; one that is over has a result."""
    folder = runs / name
    folder.mkdir(parents=True)
    settings = {"mode": "sync", "batches_per_step": 4, "checkpoint_every": "30s", "epochs": 4, "seed": 0}
    manifest: dict[str, Any] = {"run": name, "id": "0123456789abcdef", "w5xde": "0.1.0", "settings": settings}
    manifest |= {"job": "train.py", "samples": 1437, "versions": {"numpy": "2.4.6"}}
    if is_over:
        result = {"weights_sha256": HASH, "steps": 3 * rows, "seconds": rows / 4, "over": True}
        manifest |= {"reason": "all steps done", "result": result | {"metrics": {"accuracy": 0.9}}}
    (folder / "manifest.json").write_text(json.dumps(manifest | facts))
    (folder / "metrics.jsonl").touch()
    add_rows(folder, *(row(at) for at in range(1, rows + 1)))
    write_ledger(folder, RECORDS)
    with (folder / "trace.jsonl").open("wb") as file:
        for at in range(rows - 20, rows):
            file.write(line({"time": BEGAN_AT + at / 4, "of": 5, "leases": leases(BEGAN_AT + at / 4)}))
    return folder


def hold(folder: Path, pid: int | None = None) -> None:
    """Write the lock of a process, this one or another, as a coordinator does."""
    holder = {"pid": os.getpid() if pid is None else pid, "host": platform.node()}
    (folder / "lock").write_text(json.dumps(holder))
