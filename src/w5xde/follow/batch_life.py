"""The life of one batch, from the ledger: who was lent it, whose answer counted, its step, its checkpoint.

Reads the newest part of the ledger alone: all of it may be gigabytes, and `w5xde audit` reads that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from w5xde.control.audit.records import STEP_BATCHES_MAX, steps_of
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.ledger_segments import read_segment, segments
from w5xde.runtime.durable.sealed_json import Damaged, content_of, parse

# Segments of 4 MiB that are searched for the step: some minutes of a quick run, and hours of a slow one.
SEARCHED_MAX = 32
# A batch is lent shortly before its step: this many segments before it are looked through.
BEFORE = 2
_STEP, _CHECKPOINT = b'"kind":"step"', b'"kind":"checkpoint"'
_ENDS = ("took", "refused", "fenced", "cancelled", "expired")
Record = dict[str, Any]


def life_of_batch(folder: Path, epoch: int, batch: int) -> dict[str, Any]:
    """What happened to a batch, oldest first: `found` is False if no step of the part that is read has it."""
    disk = RealDisk(folder)
    names = [name for _, name in segments(disk)][-SEARCHED_MAX:]
    for at in range(len(names) - 1, -1, -1):
        step = _step_with(disk, names[at], epoch, batch)
        if step is not None:
            chain = _lent(disk, names[max(0, at - BEFORE) : at + 1], step, batch)
            chain.append(_applied(step, batch))
            chain += _safe(disk, names[at:], step)
            return {"found": True, "epoch": epoch, "batch": batch, "step": step["step"], "chain": chain}
    why = "no step that was applied has it, in the newest part of the ledger"
    return {"found": False, "epoch": epoch, "batch": batch, "why": why}


def _records(disk: RealDisk, name: str, *kinds: bytes) -> Iterator[Record]:
    """The records of a segment that contain one of these words, or all of them."""
    try:
        lines = read_segment(disk, name).split(b"\n")
    except (OSError, Damaged):
        return
    for line in lines:
        if line and (not kinds or any(kind in line[:200] for kind in kinds)):
            try:
                record = parse(content_of(line), dict[str, Any])
            except Damaged:
                continue
            yield record


def _step_with(disk: RealDisk, name: str, epoch: int, batch: int) -> Record | None:
    """The last step in a segment that has this batch: an earlier one was undone."""
    found = None
    for record in _records(disk, name, _STEP):
        try:
            count = sum(each for _, each in record["sizes"])
            if record["epoch"] == epoch and record["first"] <= batch < record["first"] + count:
                steps_of(record, STEP_BATCHES_MAX)  # ValueError if no step can look like this
                found = record
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _place(step: Record, batch: int) -> int:
    """The place of a batch among those that shares and leases of its step count."""
    offset: int = batch - step["first"]
    return offset % step["columns"] if "columns" in step else offset


def _lent(disk: RealDisk, names: list[str], step: Record, batch: int) -> list[dict[str, Any]]:
    """To which nodes the batch was lent, and how each of those leases ended."""
    place, leases, chain = _place(step, batch), dict[int, str](), list[dict[str, Any]]()
    counted = next((share[3] for share in step["shares"] if share[0] <= place < share[1]), None)
    for name in names:
        for record in _records(disk, name):
            kind, node = record.get("kind"), str(record.get("node", ""))
            if kind == "lend" and not record.get("validates"):
                for lease, index, start, stop in record["leases"]:
                    if index == step["step"] and start <= place < stop and lease not in leases:
                        leases[lease] = node
                        chain.append({"what": "lent", "node": node, "time": record["time"], "lease": lease})
            elif kind in _ENDS:
                ended = record.get("leases", [record.get("lease")])
                for lease in ended:
                    if lease in leases and lease != counted:
                        reason = str(record.get("reason", ""))
                        fact = {"what": kind, "node": leases[lease], "time": record["time"], "lease": lease}
                        chain.append(fact | {"reason": reason})
    return chain


def _applied(step: Record, batch: int) -> dict[str, Any]:
    place = _place(step, batch)
    node = next((share[2] for share in step["shares"] if share[0] <= place < share[1]), "")
    return {"what": "applied", "node": node, "time": step["time"], "step": step["step"]}


def _safe(disk: RealDisk, names: list[str], step: Record) -> list[dict[str, Any]]:
    """The first checkpoint after the step, if there is one."""
    if step.get("durable"):
        return [{"what": "safe", "time": step["time"], "version": step["version"]}]
    for name in names:
        for record in _records(disk, name, _CHECKPOINT):
            if record.get("version", -1) > step["version"] and record["time"] >= step["time"]:
                return [{"what": "safe", "time": record["time"], "version": record["version"]}]
    return []
