"""Reads a file of lines that grows, by byte offset. A last line without its end is waited for.

An offset says all that there is to remember: a reader that comes back with it misses nothing and gets nothing
twice. Knows nothing of what the lines say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# How much of a file is in memory at a time.
CHUNK_BYTES = 256 * 1024


class PlacedLine(NamedTuple):
    """A line, and the offset at which the next one begins."""

    end: int
    text: bytes


def lines_from(path: Path, offset: int) -> Iterator[PlacedLine]:
    """Yield the whole lines of a file from this offset on; none if there is no such file."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        rest = b""
        while chunk := file.read(CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                offset += len(line) + 1
                yield PlacedLine(offset, line)


def last_lines(path: Path, bytes_max: int) -> tuple[list[bytes], int]:
    """The whole lines in the last so many bytes of a file, and the offset after them."""
    size = size_of(path)
    begin = max(0, size - bytes_max)
    found = list(lines_from(path, begin))
    # The first of them may have begun before.
    kept = found[1:] if begin else found
    return [line.text for line in kept], found[-1].end if found else begin


def size_of(path: Path) -> int:
    """The bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
