"""The step log: with `--durability step` every step is here, synced, before it counts.

    steps-2-1-000000500.log    what life 2 of the coordinator applied from version 500 on: its first segment

A record is the sum of a step's gradients and what belongs to it: after a crash the learner applies it again,
and has the same weights. Segments go when no checkpoint needs them any more.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from w5xde.runtime.durable.disk import Appender, Disk
from w5xde.runtime.durable.sealed_json import Damaged, parse

_HEAD = struct.Struct("<4sIQ32s")
_MAGIC = b"w5sl"

# A record and its body.
Logged = tuple[dict[str, Any], bytes]
_NAME = re.compile(r"steps-(\d+)-(\d+)-(\d{9,})\.log")


class StepLog:
    """Writes one life's steps."""

    def __init__(self, disk: Disk, life: int) -> None:
        self._disk = disk
        self._life = life
        self._file: Appender | None = None
        # Whether a step is missing before the segment: until a checkpoint covers that, nothing counts.
        self._has_gap = False
        # One that died before the ledger knew of it has had the same number of life.
        self._segments = max((number for of, number, _, _ in _segments(disk) if of == life), default=0)
        # The version with which the open segment began, as long as nothing is in it.
        self._first: int | None = None

    def begin(self, version: int) -> None:
        """Steps from this version on go into a segment of their own."""
        if self._file is not None and self._first == version:
            return  # nothing was written into it
        self.close()
        self._segments += 1
        self._file = self._disk.append(f"steps-{self._life}-{self._segments}-{version:09}.log")
        self._first = version

    def resume(self, version: int, last: Logged | None) -> None:
        """Go on after what was read. The last of that may not have been synced: it is written once more."""
        if last is None:
            self.begin(version)
        else:
            self.begin(last[0]["version"])
            self.write(*last)

    def anchored(self) -> None:
        """The checkpoint with which the segment begins is on the disk."""
        self._has_gap = self._file is None

    def write(self, record: dict[str, Any], body: bytes | memoryview) -> bool:
        """Write a step and sync it; False if that makes nothing durable, because an earlier write failed."""
        if self._file is None:
            self._has_gap = True
            return False
        self._first = None
        header = msgspec.json.encode(record)
        digest = hashlib.sha256(header)
        digest.update(body)
        head = _HEAD.pack(_MAGIC, len(header), memoryview(body).nbytes, digest.digest())
        try:
            self._file.write(b"".join((head, header, body)))
            self._file.sync()
        except OSError:
            # Steps after one that is missing are worth nothing: the next segment begins with a checkpoint.
            self.close()
            self._has_gap = True
            raise
        return not self._has_gap

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _segments(disk: Disk) -> list[tuple[int, int, int, str]]:
    """(life, number, first version, name) in the order in which they were written."""
    found = [(match, name) for name in disk.names() if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), int(match[3]), name) for match, name in found)


def forget_steps(disk: Disk, version: int) -> None:
    """No checkpoint older than this version is left: drop what only older ones need."""
    for (_, _, _, name), (_, _, later, _) in pairwise(_segments(disk)):
        if later <= version:
            disk.remove(name)


def read_steps(disk: Disk, version: int) -> Iterator[Logged]:
    """Steps from `version` on, each applied to the one before, as far as they are whole.

    Damaged: one is whole, and yet nothing that we would write.
    """
    segments = _segments(disk)
    # What a later segment begins with is what really followed; one without a whole record says nothing.
    firsts = [first if any(_records(disk.read(name))) else None for _, _, first, name in segments]
    for at, (_, _, _, name) in enumerate(segments):
        limit = min((first for first in firsts[at + 1 :] if first is not None), default=None)
        if limit is not None and limit <= version:
            continue
        # One segment at a time: it holds every gradient since a checkpoint.
        for record, body in _records(disk.read(name)):
            if limit is not None and record["version"] >= limit:
                break
            if record["version"] == version:
                yield record, body
                version += 1


def _records(data: bytes) -> Iterator[Logged]:
    at = 0
    while at + _HEAD.size <= len(data):
        magic, header_bytes, body_bytes, digest = _HEAD.unpack_from(data, at)
        start, middle, end = (
            at + _HEAD.size,
            at + _HEAD.size + header_bytes,
            at + _HEAD.size + header_bytes + body_bytes,
        )
        if magic != _MAGIC or end > len(data) or hashlib.sha256(data[start:end]).digest() != digest:
            return
        record = parse(data[start:middle], dict[str, Any])
        if not isinstance(record.get("version"), int):
            raise Damaged("a record of the step log has no version")
        yield record, data[middle:end]
        at = end
