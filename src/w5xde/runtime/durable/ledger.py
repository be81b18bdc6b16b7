"""The ledger on the disk: one sealed record a line, each chained to the one before, in numbered segments.

    ledger-000001.jsonl     {"sha256":"…","sealed":{"kind":"segment","number":1,"after":"000…",…}}
                            {"sha256":"…","sealed":{"time":…,"kind":"start",…}}

A segment begins with the hash that it follows. Whoever starts, or has met an error, begins a new one after
the last line that is surely on the disk and writes again what followed; lines beyond that place are void.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from w5xde.runtime.durable.disk import Appender, Disk, replace
from w5xde.runtime.durable.sealed_json import NOTHING, Damaged, content_of, parse, seal, unseal

SEGMENT_BYTES = 16 * 1024 * 1024
# How much is kept in memory for a disk that cannot be written; what is beyond is lost, and the audit says so.
UNSYNCED_BYTES_MAX = 64 * 1024 * 1024
SEGMENT_NAME = re.compile(r"ledger-(\d{6,})\.jsonl")

Record = dict[str, Any]
_ENCODER = msgspec.json.Encoder()


def segment_name(number: int) -> str:
    return f"ledger-{number:06}.jsonl"


def segments(disk: Disk) -> list[tuple[int, str]]:
    found = [(int(match[1]), name) for name in disk.names() if (match := SEGMENT_NAME.fullmatch(name))]
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the ledger: the hash of a line, and how many records came up to it."""

    sha256: str = NOTHING
    records: int = 0


class _Head(msgspec.Struct, frozen=True):
    """The first line of a segment."""

    kind: str
    number: int
    # The line it follows, and how many came up to it.
    after: str
    records: int
    life: int


class Ledger:
    """Writes the ledger of one life of a coordinator. `clock` only stamps the lines, for people."""

    def __init__(self, disk: Disk, clock: Callable[[], float], life: int, after: Mark, segment: int) -> None:
        self._disk = disk
        self._clock = clock
        self.life = life
        self._segment = segment
        self._file: Appender | None = None
        self._bytes = 0
        self.head = after
        # What is surely on the disk, and the contents written or to be written since.
        self._synced = after
        self._unsynced: list[bytes] = []
        self._unsynced_bytes = 0
        # How many contents were ever synced and let go: two syncs may be under way at a time.
        self._let_go = 0
        self._under_way: list[Syncing] = []
        # Why the open segment could not be synced: then no later sync of it is believed.
        self._spoiled: list[OSError] = []

    @classmethod
    def open(cls, disk: Disk, clock: Callable[[], float]) -> Ledger:
        """Continue the ledger in this folder, or begin it: always the next life of its coordinator."""
        life, mark, newest = 0, Mark(), 0
        for number, name in reversed(segments(disk)):
            newest = max(newest, number)
            reader = _Segment(disk.read(name))
            if reader.head is None:
                continue  # its writer died before its first line was complete
            life = reader.head.life
            for _ in reader.records():
                pass
            mark = reader.mark
            if reader.damage:
                disk.write(f"damaged-{newest + 1:06}-{name}", [disk.read(name)])
            # Its dead writer may not have synced it, and what follows must never outlive it.
            replace(disk, name, reader.whole)
            break
        return cls(disk, clock, life + 1, mark, newest)

    def write(self, records: list[Record]) -> bool:
        """Hand records over to the system; False if that must wait for a sync under way.

        After an OSError call again: nothing is lost or written twice.
        """
        now = round(self._clock(), 3)
        fresh = [_ENCODER.encode({"time": now, **record}) for record in records]
        self._unsynced += fresh
        self._unsynced_bytes += sum(map(len, fresh))
        if self._unsynced_bytes > UNSYNCED_BYTES_MAX:
            gap = _ENCODER.encode({"time": now, "kind": "gap", "records": len(self._unsynced)})
            self._let_go += len(self._unsynced)
            self._unsynced, self._unsynced_bytes = [gap], len(gap)
            self._drop_segment()
        if self._file is None:
            if self._under_way:
                return False  # what is surely on the disk will be known when that is done
            self._begin_segment()
            fresh = self._unsynced
        if fresh:
            self._append(fresh)
        if self._bytes > SEGMENT_BYTES:
            self.sync()
            self._drop_segment()
        return True

    def _begin_segment(self) -> None:
        self._segment += 1
        self._file, self._spoiled = self._disk.append(segment_name(self._segment)), []
        self._bytes = 0
        self.head = self._synced
        head = _Head("segment", self._segment, self.head.sha256, self.head.records, self.life)
        try:
            self._append([_ENCODER.encode(head)])
        except OSError:
            # A disk that stays full is tried every second: that must not leave a file each time.
            with contextlib.suppress(OSError):
                self._disk.remove(segment_name(self._segment))
            raise

    def _append(self, contents: list[bytes]) -> None:
        if self._file is None:
            raise ValueError("no segment is open")
        lines, before, count = [], self.head.sha256, self.head.records
        for content in contents:
            line, before = seal(content, before)
            lines.append(line)
            count += 1
        data = b"\n".join(lines) + b"\n"
        try:
            self._file.write(data)
        except OSError:
            self._drop_segment()
            raise
        self._bytes += len(data)
        self.head = Mark(before, count)

    def _drop_segment(self) -> None:
        # What of it is on the disk nobody knows: the next one begins after what surely is.
        file, self._file = self._file, None
        self.head = self._synced
        if file is not None and not any(syncing.file is file for syncing in self._under_way):
            file.close()

    def sync(self) -> None:
        """All records written so far survive the machine's death."""
        syncing = self.begin_sync()
        if syncing is not None:
            syncing.sync()
            self.end_sync(syncing)

    def begin_sync(self) -> Syncing | None:
        """The same in three parts, of which only the middle one takes time and may be done by a thread."""
        if self._file is None:
            return None
        syncing = Syncing(self._file, self.head, self._let_go + len(self._unsynced), self._spoiled)
        self._under_way.append(syncing)
        return syncing

    def end_sync(self, syncing: Syncing) -> None:
        self._under_way.remove(syncing)
        if syncing.file is not self._file and not any(s.file is syncing.file for s in self._under_way):
            syncing.file.close()  # dropped meanwhile
        if syncing.error is not None:
            # A sync that failed is never believed later: these pages may be gone.
            if syncing.file is self._file:
                self._drop_segment()
            raise syncing.error
        count = syncing.contents - self._let_go
        if count > 0 and (self._file is None or syncing.file is self._file):
            del self._unsynced[:count]
            self._let_go += count
            self._unsynced_bytes = sum(map(len, self._unsynced))
            self._synced = syncing.mark
            if self._file is None:
                self.head = self._synced

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True, eq=False)
class Syncing:
    """A sync under way: up to which place, and how it went."""

    file: Appender
    mark: Mark
    contents: int
    # What happened to the file: shared by all syncs of it, of which one follows the other.
    spoiled: list[OSError]
    error: OSError | None = None

    def sync(self) -> None:
        if not self.spoiled:
            try:
                self.file.sync()
            except OSError as error:
                self.spoiled.append(error)
        # The system forgets pages that it could not write, and says so once: the next sync would succeed.
        self.error = self.spoiled[0] if self.spoiled else None


# --- reading --------------------------------------------------------------------------------------


class _Segment:
    """One segment's lines, checked against their chain."""

    def __init__(self, data: bytes) -> None:
        *self._lines, self.torn = data.split(b"\n")
        self._good_lines = 0
        self.head: _Head | None = None
        self.mark = Mark()
        # Why reading stopped before the end, or nothing.
        self.damage = ""
        if self._lines:
            try:
                head = parse(content_of(self._lines[0]), _Head)
                _, digest = unseal(self._lines[0], head.after)
            except Damaged:
                return
            self.head = head
            self._good_lines = 1
            self.mark = Mark(digest, head.records + 1)

    @property
    def is_damaged(self) -> bool:
        """Whether there is a whole first line that nobody wrote so; a torn one has no end."""
        return self.head is None and bool(self._lines)

    @property
    def whole(self) -> bytes:
        """The bytes of all lines that were read so far."""
        return b"".join(line + b"\n" for line in self._lines[: self._good_lines])

    def records(self, until: str | None = None) -> Iterator[Any]:
        """Its records, up to the line with the hash `until` or as far as the chain holds."""
        for number, line in enumerate(self._lines[1:], 2):
            if self.mark.sha256 == until:
                return
            try:
                content, digest = unseal(line, self.mark.sha256)
                record = parse(content, object)
            except Damaged:
                self.damage = f"line {number} is not what was written"
                return
            self.mark = Mark(digest, self.mark.records + 1)
            self._good_lines = number
            yield record


@dataclass(slots=True)
class Reading:
    """Reads a whole ledger. `damage` and `remarks` are complete once `records` is exhausted."""

    disk: Disk
    # Hashes that must occur: places that checkpoints point at.
    expected: set[str] = field(default_factory=set)
    damage: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    mark: Mark = field(default_factory=Mark)

    def records(self) -> Iterator[Any]:
        found = []
        for _, name in segments(self.disk):
            segment = _Segment(self.disk.read(name))
            if segment.is_damaged:
                self.damage.append(f"{name}: line 1 is not what was written")
            elif segment.head is None:
                self.remarks.append(f"{name} holds no complete first line: its writer died there")
            else:
                found.append((name, segment, segment.head))
        self.expected.discard(NOTHING)
        for at, (name, segment, head) in enumerate(found):
            if head.after != self.mark.sha256:
                self.damage.append(f"{name} does not follow what comes before it")
            until = found[at + 1][2].after if at + 1 < len(found) else None
            self.expected.discard(segment.mark.sha256)
            if until == self.mark.sha256 and until is not None:
                continue  # nothing of it was surely on the disk, and its successor wrote it again
            for record in segment.records(until):
                self.expected.discard(segment.mark.sha256)
                yield record
            if segment.damage:
                self.damage.append(f"{name}: {segment.damage}")
            elif until is None and segment.torn:
                self.remarks.append(f"{name} ends in the middle of a line: its writer died there")
            self.mark = segment.mark
        self.damage += [
            f"no line has the hash {hash_[:16]}…, which a checkpoint names" for hash_ in self.expected
        ]
