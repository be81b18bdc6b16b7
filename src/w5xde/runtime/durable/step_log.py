"""The step log: with `--durability step` each step is written and synced here before it counts.

    steps-2-1-000000500.log    first segment of the coordinator's second life, from version 500 on

A record holds the sum of a step's gradients and the core's cut after that step. After a crash the learner
applies the records again and gets the same weights. Segments that no checkpoint needs are removed.
Knows neither gradients nor cuts: a record is a JSON header and a body of bytes.
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

# Magic, bytes of the header, bytes of the body, sha256 of both.
_PREFIX = struct.Struct("<4sIQ32s")
_MAGIC = b"w5sl"

# A record's header and its body.
Logged = tuple[dict[str, Any], bytes]
_NAME = re.compile(r"steps-(\d+)-(\d+)-(\d{9,})\.log")


class StepLog:
    """Writes the steps of one life of the coordinator."""

    def __init__(self, disk: Disk, life: int) -> None:
        self._disk = disk
        self.life = life
        self._file: Appender | None = None
        # A step is missing before the open segment: nothing is durable until a checkpoint covers the gap.
        self._has_gap = False
        # The version at which the open segment begins, while the segment is empty.
        self._first: int | None = None

    def begin(self, version: int) -> None:
        """Write the steps from this version on into a new segment."""
        if self._file is not None and self._first == version:
            return  # the open segment is still empty
        self.close()
        # A life that died before its ledger was written has had the same number as this one.
        number = max((number for life, number, _, _ in _segments(self._disk) if life == self.life), default=0)
        self._file = self._disk.append(f"steps-{self.life}-{number + 1}-{version:09}.log")
        self._first = version

    def resume(self, version: int, last: Logged | None) -> None:
        """Continue after the replayed steps. The last of them may not be synced: write it once more."""
        if last is None:
            self.begin(version)
        else:
            self.begin(last[0]["version"])
            self.write(*last)

    def anchored(self) -> None:
        """The checkpoint with which the open segment begins is durable."""
        self._has_gap = self._file is None

    def write(self, record: dict[str, Any], body: bytes | memoryview) -> bool:
        """Write and sync a step; return False if it is not durable because an earlier write failed."""
        if self._file is None:
            self._has_gap = True
            return False
        self._first = None
        header = msgspec.json.encode(record)
        digest = hashlib.sha256(header)
        digest.update(body)
        prefix = _PREFIX.pack(_MAGIC, len(header), memoryview(body).nbytes, digest.digest())
        try:
            self._file.write(b"".join((prefix, header, body)))
            self._file.sync()
        except OSError:
            # Steps after a missing one cannot be replayed: the next segment begins with a checkpoint.
            self.close()
            self._has_gap = True
            raise
        return not self._has_gap

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _segments(disk: Disk) -> list[tuple[int, int, int, str]]:
    """Return (life, number, first version, name) of each segment, in the order of writing."""
    found = [(match, name) for name in disk.names() if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), int(match[3]), name) for match, name in found)


def forget_steps(disk: Disk, version: int) -> None:
    """Remove the segments that no checkpoint of this version or a later one needs."""
    for (_, _, _, name), (_, _, later, _) in pairwise(_segments(disk)):
        if later <= version:
            disk.remove(name)


def read_steps(disk: Disk, version: int) -> Iterator[Logged]:
    """Yield the steps from `version` on, one record at a time, up to the first that is torn or missing.

    Raises Damaged for a record whose hash is right and whose content no writer of ours produces.
    """
    segments = _segments(disk)
    # A later segment supersedes what an earlier one has from its first version on, unless it is empty.
    firsts = [
        first if next(_records(disk, name), None) is not None else None for _, _, first, name in segments
    ]
    for at, (_, _, _, name) in enumerate(segments):
        limit = min((first for first in firsts[at + 1 :] if first is not None), default=None)
        if limit is not None and limit <= version:
            continue
        for record, body in _records(disk, name):
            if limit is not None and record["version"] >= limit:
                break
            if record["version"] == version:
                yield record, body
                version += record.get("steps", 1)


def _records(disk: Disk, name: str) -> Iterator[Logged]:
    """Yield a segment's whole records. A body is as large as the model: only one is in memory at a time."""
    at = 0
    while len(prefix := disk.read(name, at, _PREFIX.size)) == _PREFIX.size:
        magic, header_bytes, body_bytes, digest = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            return
        at += _PREFIX.size
        header = disk.read(name, at, header_bytes)
        body = disk.read(name, at + header_bytes, body_bytes)
        found = hashlib.sha256(header)
        found.update(body)
        if (len(header), len(body), found.digest()) != (header_bytes, body_bytes, digest):
            return
        record = parse(header, dict[str, Any])
        if not isinstance(record.get("version"), int) or not isinstance(record.get("steps", 1), int):
            raise Damaged("a record of the step log has no version")
        yield record, body
        at += header_bytes + body_bytes
