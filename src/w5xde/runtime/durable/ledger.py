"""The ledger's writer: appends sealed records to numbered segments, and syncs them.

A life of the coordinator, an error, and a full segment begin a new segment: it follows the last line that is
surely on the disk, and the writer repeats what came after that line. `ledger_segments` has the
format. Knows no kind of record except its own `gap`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from w5xde.runtime.durable.disk import Appender, Disk, replace
from w5xde.runtime.durable.ledger_segments import Mark, Segment, SegmentHead, segment_name, segments
from w5xde.runtime.durable.sealed_json import seal

# A sync closes a segment that is larger. Closed ones are compressed, so small ones save more; but each begins
# with a few lines of the one before, and is a file more.
SEGMENT_BYTES = 4 * 1024 * 1024
# Records kept in memory while the disk cannot be written; more are dropped, and the audit says so.
UNSYNCED_BYTES_MAX = 64 * 1024 * 1024

Record = dict[str, Any]
_ENCODER = msgspec.json.Encoder()


class Ledger:
    """Writes the ledger of one life of a coordinator. `clock` only stamps the lines, for people."""

    def __init__(self, disk: Disk, clock: Callable[[], float], segment_bytes: int = SEGMENT_BYTES) -> None:
        """Continue the ledger in this folder, or begin it, as the next life of its coordinator."""
        self.disk = disk
        self._clock = clock
        self.segment_bytes = segment_bytes
        self.life = 1
        # The number of the newest segment.
        self._number = 0
        self._file: Appender | None = None
        self._bytes = 0
        # The last line written, and the last line that is surely on the disk.
        self.head = self._synced = self._continue()
        # The contents since `_synced`, written or still to be written.
        self._unsynced: list[bytes] = []
        self._unsynced_bytes = 0
        self._syncing: Syncing | None = None

    def _continue(self) -> Mark:
        """Find the last whole line of earlier lives."""
        for number, name in reversed(segments(self.disk)):
            self._number = max(self._number, number)
            segment = Segment(self.disk, name)
            if segment.head is None:
                continue  # its writer died before its first line was complete
            self.life = segment.head.life + 1
            for _ in segment.records():
                pass
            if segment.damage:
                self.disk.write(f"damaged-{self._number + 1:06}-{name}", [self.disk.read(name)])
            # Its dead writer may not have synced it, and what follows must never outlive it.
            replace(self.disk, segment_name(number), segment.whole)
            return segment.mark
        return Mark()

    @property
    def closed_segments(self) -> int:
        """The number of the newest segment that is no longer written."""
        return self._number - (self._file is not None)

    def write(self, records: list[Record]) -> bool:
        """Pass records to the operating system; return False if that must wait for the sync under way.

        After an OSError call again: nothing is lost or written twice.
        """
        now = round(self._clock(), 3)
        fresh = [_ENCODER.encode({"time": now, **record}) for record in records]
        self._unsynced += fresh
        self._unsynced_bytes += sum(map(len, fresh))
        if self._unsynced_bytes > UNSYNCED_BYTES_MAX:
            gap = _ENCODER.encode({"time": now, "kind": "gap", "records": len(self._unsynced)})
            self._unsynced, self._unsynced_bytes = [gap], len(gap)
            if self._syncing is not None:
                self._syncing.contents = 0
            self._drop_segment()
        if self._file is None:
            if self._syncing is not None:
                return False  # its end tells which lines are surely on the disk
            self._begin_segment()
            fresh = self._unsynced
        if fresh:
            self._append(fresh)
        return True

    def _begin_segment(self) -> None:
        self._number += 1
        self._file = self.disk.append(segment_name(self._number))
        self._bytes = 0
        self.head = self._synced
        head = SegmentHead("segment", self._number, self.head.sha256, self.head.records, self.life)
        try:
            self._append([_ENCODER.encode(head)])
        except OSError:
            # A disk that stays full is tried every second: that must not leave a file each time.
            with contextlib.suppress(OSError):
                self.disk.remove(segment_name(self._number))
            raise

    def _append(self, contents: list[bytes]) -> None:
        if self._file is None:
            raise ValueError("no segment is open")
        lines, before = [], self.head.sha256
        for content in contents:
            line, before = seal(content, before)
            lines.append(line)
        data = b"\n".join(lines) + b"\n"
        try:
            self._file.write(data)
        except OSError:
            self._drop_segment()
            raise
        self._bytes += len(data)
        self.head = Mark(before, self.head.records + len(contents))

    def _drop_segment(self) -> None:
        # Which of its lines are on the disk is unknown: the next segment follows the last synced line.
        file, self._file = self._file, None
        self.head = self._synced
        if file is not None and (self._syncing is None or self._syncing.file is not file):
            file.close()

    @property
    def is_synced(self) -> bool:
        """Whether every record that was written would survive a power cut."""
        return not self._unsynced

    def sync(self) -> None:
        """Make all records written so far survive a power cut."""
        syncing = self.begin_sync()
        if syncing is not None:
            syncing.sync()
            self.end_sync(syncing)
        elif self._syncing is not None:
            raise OSError(errno.EBUSY, "another thread syncs the ledger")

    def begin_sync(self) -> Syncing | None:
        """Begin a sync in three parts; only the middle one, `Syncing.sync`, takes time, on any thread.

        Returns None if no segment is open or another sync is under way.
        """
        if self._file is None or self._syncing is not None:
            return None
        self._syncing = Syncing(self._file, self.head, len(self._unsynced))
        return self._syncing

    def end_sync(self, syncing: Syncing) -> None:
        """Count what was synced; raise the OSError of a sync that failed."""
        self._syncing = None
        if syncing.file is not self._file:
            syncing.file.close()  # dropped meanwhile
        if syncing.error is not None:
            # The system drops pages that it could not write, and a later sync would succeed without them.
            if syncing.file is self._file:
                self._drop_segment()
            raise syncing.error
        if syncing.contents:
            del self._unsynced[: syncing.contents]
            self._unsynced_bytes = sum(map(len, self._unsynced))
            self._synced = syncing.mark
            if self._bytes > self.segment_bytes:
                # Full. The next segment repeats the few lines written during this sync.
                self._drop_segment()
            if self._file is None:
                self.head = self._synced

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True, eq=False)
class Syncing:
    """A sync under way: up to which line, and its error."""

    file: Appender
    mark: Mark
    # How many contents it makes durable.
    contents: int
    error: OSError | None = None

    def sync(self) -> None:
        try:
            self.file.sync()
        except OSError as error:
            self.error = error
