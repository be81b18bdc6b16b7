"""The files of a ledger: their names, their chain of hashes, how to read them and how to compress them.

    ledger-000001.jsonl.zst     a closed segment, compressed; `zstd -dc` gives its lines as they were written
    ledger-000002.jsonl         {"sha256":"…","sealed":{"kind":"segment","number":2,"after":"…",…}}
                                {"sha256":"…","sealed":{"time":…,"kind":"lend",…}}

Each line holds the sha256 of the line before and of its own content. A segment's first line names the line
that the segment follows; lines of earlier segments beyond that place are void. Knows no kind of record.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zstandard

from w5xde.runtime.durable.disk import Disk, replace
from w5xde.runtime.durable.sealed_json import NOTHING, Damaged, content_of, parse, unseal

# A larger segment is neither compressed nor decompressed: a small file must not fill the memory of its
# reader. Writers close a segment at 4 MiB; only a disk that failed for long makes a larger one.
COMPRESSED_BYTES_MAX = 128 * 1024 * 1024
_SUFFIX = ".zst"
_NAME = re.compile(r"ledger-(\d{6,})\.jsonl(\.zst)?")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the ledger: the hash of a line, and the number of lines up to it."""

    sha256: str = NOTHING
    records: int = 0


class SegmentHead(msgspec.Struct, frozen=True):
    """The first line of a segment."""

    kind: str
    number: int
    # The line that the segment follows, and the number of lines up to it.
    after: str
    records: int
    life: int


def segment_name(number: int) -> str:
    return f"ledger-{number:06}.jsonl"


def segments(disk: Disk) -> list[tuple[int, str]]:
    """Return (number, file name) of each segment; the plain file where a compressed copy is there too."""
    found = [(int(match[1]), name) for name in disk.names() if (match := _NAME.fullmatch(name))]
    # A plain name sorts after its copy's here, and so replaces it.
    return sorted(dict(sorted(found, key=lambda each: (each[0], not each[1].endswith(_SUFFIX)))).items())


# --- compression ----------------------------------------------------------------------------------


def compress_segments(disk: Disk, numbers: Iterable[int], bytes_min: int) -> None:
    """Replace closed segments by compressed copies, except those too small to be worth it.

    The copy is synced and read back before the original is removed. An OSError leaves the original.
    """
    for name in map(segment_name, numbers):
        if name not in disk.names():
            continue  # compressed already, or never written
        data = disk.read(name)
        if bytes_min <= len(data) <= COMPRESSED_BYTES_MAX:
            replace(disk, name + _SUFFIX, zstandard.ZstdCompressor().compress(data))
            if _decompress(disk.read(name + _SUFFIX)) != data:
                raise OSError(errno.EIO, "the compressed copy is not what was written", name)
            disk.remove(name)


def _decompress(data: bytes) -> bytes:
    try:
        if not 0 <= zstandard.frame_content_size(data) <= COMPRESSED_BYTES_MAX:
            raise Damaged("it is not a compressed segment")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Damaged(f"it cannot be decompressed: {error}") from error


def read_segment(disk: Disk, name: str) -> bytes:
    """Return the lines of a segment, decompressed; raises OSError or Damaged."""
    try:
        data = disk.read(name)
    except FileNotFoundError:
        # A running coordinator compressed it since its name was listed.
        name += _SUFFIX
        data = disk.read(name)
    return _decompress(data) if name.endswith(_SUFFIX) else data


# --- reading --------------------------------------------------------------------------------------


class Segment:
    """The lines of one segment, checked against their chain."""

    def __init__(self, disk: Disk, name: str) -> None:
        self.head: SegmentHead | None = None
        # The last line that was read.
        self.mark = Mark()
        # Why reading stopped before the end, or nothing. A torn first line is no damage.
        self.damage = ""
        self._lines: list[bytes] = []
        self._good_lines = 0
        self.is_torn = False
        try:
            *self._lines, torn = read_segment(disk, name).split(b"\n")
            self.is_torn = bool(torn)
            if self._lines:
                head = parse(content_of(self._lines[0]), SegmentHead)
                _, digest = unseal(self._lines[0], head.after)
                self.head, self.mark, self._good_lines = head, Mark(digest, head.records + 1), 1
        except Damaged as damage:
            self.damage = "line 1 is not what was written" if self._lines else str(damage)

    @property
    def whole(self) -> bytes:
        """The bytes of all lines that were read so far."""
        return b"".join(line + b"\n" for line in self._lines[: self._good_lines])

    def records(self, until: str | None = None) -> Iterator[Any]:
        """Yield its records up to the line with the hash `until`, or as far as the chain holds."""
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

    def reaches(self, sha256: str) -> bool:
        """Whether a segment that follows the line with this hash can follow this segment."""
        if self.head is not None and self.head.after == sha256:
            return True  # nothing of this segment was durable, and its successor wrote it again
        for _ in self.records(sha256):
            pass
        return self.mark.sha256 == sha256


@dataclass(slots=True)
class LedgerReader:
    """Reads a whole ledger. `damage` and `remarks` are complete once `records` is exhausted."""

    disk: Disk
    # Hashes of lines that must be there, because a checkpoint or the manifest names them.
    expected: set[str] = field(default_factory=set)
    damage: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    mark: Mark = field(default_factory=Mark)

    def records(self) -> Iterator[Any]:
        """Yield every record that counts, with two segments in memory at a time."""
        self.expected.discard(NOTHING)
        before: tuple[str, Segment] | None = None
        for _, name in segments(self.disk):
            segment = Segment(self.disk, name)
            if segment.damage:
                self.damage.append(f"{name}: {segment.damage}")
            elif segment.head is None:
                self.remarks.append(f"{name} holds no complete first line: its writer died there")
            else:
                if before is not None:
                    yield from self._segment(*before, segment.head.after)
                before = name, segment
        if before is not None:
            yield from self._segment(*before, None)
        self.damage += [
            f"no line has the hash {each[:16]}…, which a checkpoint or the manifest names"
            for each in self.expected
        ]

    def _segment(self, name: str, segment: Segment, until: str | None) -> Iterator[Any]:
        """Yield a segment's records up to the place where the next segment follows."""
        if segment.head is not None and segment.head.after != self.mark.sha256:
            self.damage.append(f"{name} does not follow what comes before it")
        self.expected.discard(segment.mark.sha256)
        if until is not None and until == self.mark.sha256:
            return  # nothing of it was durable, and its successor wrote it again
        for record in segment.records(until):
            self.expected.discard(segment.mark.sha256)
            yield record
        if segment.damage:
            self.damage.append(f"{name}: {segment.damage}")
        elif until is None and segment.is_torn:
            self.remarks.append(f"{name} ends in the middle of a line: its writer died there")
        self.mark = segment.mark


def find_missing_segments(disk: Disk) -> list[str]:
    """Describe each gap in the numbers of the segments where lines are missing.

    A number may be missing for a good reason, so the segments on both sides of a gap are read; no others
    are, because a long run has gigabytes of them.
    """
    found: list[str] = []
    names = segments(disk)
    numbers = [0, *(number for number, _ in names)]
    for at, (number, _) in enumerate(names):
        if number == numbers[at] + 1:
            continue
        later = (Segment(disk, name).head for _, name in names[at:])
        after = next((head.after for head in later if head is not None), None)
        if after is None:
            continue  # its writer died before a first line was complete: nothing followed the gap
        earlier = (Segment(disk, name) for _, name in reversed(names[:at]))
        before = next((segment for segment in earlier if segment.head is not None), None)
        if not (before.reaches(after) if before is not None else after == NOTHING):
            where = f"between segments {numbers[at]} and {number}" if at else f"before segment {number}"
            found.append(f"the ledger has lost what was {where}")
    return found
