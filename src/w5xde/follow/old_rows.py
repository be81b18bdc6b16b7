"""Reads the older rows of a long run: hundreds of megabytes, in about a second.

Nearly all of such a row is facts of nodes, which newer rows replace. They are cut out before the row is
decoded; but for the row that says that a node has left, because no other does.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from w5xde.follow.rows import MetricsRow, read_row

_GONE = b'"state":"gone"'
# Objects with an entry for each node: flat ones, in the order in which rows have them, and the last one.
_FLAT = (b'"computing":{', b'"nodes":{')
_FACTS = b'"node_facts":{'
_DECODER = msgspec.json.Decoder(MetricsRow)


def old_rows(path: Path, begin: int, end: int) -> Iterator[tuple[int, MetricsRow | None]]:
    """Yield (offset after it, row) of each line between two offsets; None for a line that is no row."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ) as data:
        while begin < end:
            stop = data.find(b"\n", begin)
            if stop < 0:
                return
            yield stop + 1, _row(data, begin, stop)
            begin = stop + 1


def _row(data: mmap.mmap, begin: int, stop: int) -> MetricsRow | None:
    at, pieces = begin, []
    for name in _FLAT:
        found = data.find(name, at, stop)
        close = data.find(b"}", found, stop) if found >= 0 else -1
        if close < 0:
            return read_row(data[begin:stop])
        pieces.append(data[at : found + len(name)])
        at = close
    facts = data.find(_FACTS, at, stop)
    if facts < 0 or data.find(_GONE, facts, stop) >= 0:
        return read_row(data[begin:stop])
    try:
        return _DECODER.decode(b"".join([*pieces, data[at:facts], _FACTS, b"}}"]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return read_row(data[begin:stop])
