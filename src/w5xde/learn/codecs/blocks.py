"""Blocks: bytes cut into pieces of one MiB, each shuffled and compressed independently, on all cores.

    | length of each block, u32; the highest bit: stored uncompressed | block | block | …

The number of blocks and the decompressed length of each follow from the length of the whole, which both sides
know. A block that does not shrink is stored, so the result is never longer than the input and the table.
Knows no vectors: callers say where values of which size lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.compressors import BLOCK_BYTES, Compressor, refuse
from w5xde.learn.codecs.numbers import Run
from w5xde.learn.model.parallel import on_all_cores

Bytes = NDArray[np.uint8]

_LENGTH = np.dtype("<u4")
_STORED = 1 << 31


def blocks_of(whole_bytes: int) -> int:
    return -(-whole_bytes // BLOCK_BYTES)


def bytes_max(whole_bytes: int) -> int:
    """The longest compressed form of `whole_bytes`."""
    return whole_bytes + blocks_of(whole_bytes) * _LENGTH.itemsize


def cover(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The runs between two bytes, relative to the first; bytes between runs count as runs of single bytes."""
    found, at = [], begin
    for run in runs:
        first, last = max(run.start, begin), min(run.end, end)
        if first < last:
            if at < first:
                found.append(Run(at - begin, first - at, 1))
            found.append(Run(first - begin, (last - first) // run.size, run.size))
            at = last
    if at < end:
        found.append(Run(at - begin, end - at, 1))
    return found


def shuffle(plain: Bytes, runs: Sequence[Run]) -> Bytes:
    """Put byte 0 of all values of a run together, then byte 1 of all values, and so on.

    Signs and exponents of neighbours are alike and compress well; mantissas are noise.
    """
    shuffled = np.empty_like(plain)
    for values, planes in _planes(plain, shuffled, runs):
        planes[:] = values
    return shuffled


def unshuffle(shuffled: Bytes, plain: Bytes, runs: Sequence[Run]) -> None:
    for values, planes in _planes(plain, shuffled, runs):
        values[:] = planes


def _planes(plain: Bytes, shuffled: Bytes, runs: Sequence[Run]) -> Iterator[tuple[Bytes, Bytes]]:
    """Byte `i` of all values of a run, in the plain bytes and in the shuffled ones."""
    for run in runs:
        values = plain[run.start : run.end].reshape(run.count, run.size)
        planes = shuffled[run.start : run.end].reshape(run.size, run.count)
        for place in range(run.size):
            yield values[:, place], planes[place]


def compress(whole: Bytes, compressor: Compressor, runs: Sequence[Run] | None) -> list[memoryview]:
    """The table and the blocks, whose values are shuffled if `runs` are given."""
    count = blocks_of(len(whole))
    table = np.zeros(count, _LENGTH)
    pieces = [table.data.cast("B") if count else memoryview(b"")] * (count + 1)

    def block(number: int) -> None:
        begin = number * BLOCK_BYTES
        plain = whole[begin : begin + BLOCK_BYTES]
        if runs is not None:
            plain = shuffle(plain, cover(runs, begin, begin + len(plain)))
        compressed = compressor.compress(plain.data)
        is_stored = len(compressed) >= len(plain)
        table[number] = len(plain) | _STORED if is_stored else len(compressed)
        pieces[number + 1] = plain.data if is_stored else memoryview(compressed)

    on_all_cores(block, count)
    return pieces


def decompress(body: memoryview, whole: Bytes, compressor: Compressor, runs: Sequence[Run] | None) -> None:
    """Decompress into `whole`; refuses a body that does not give exactly its length."""
    count = blocks_of(len(whole))
    table_bytes = count * _LENGTH.itemsize
    if len(body) < table_bytes:
        raise refuse(f"{len(body)} compressed bytes, too few for a table of {count} blocks")
    table = np.frombuffer(body, _LENGTH, count).tolist() if count else []
    ends = list(accumulate((length & ~_STORED for length in table), initial=table_bytes))
    if ends[-1] != len(body):
        raise refuse(f"{len(body)} compressed bytes where the table says {ends[-1]}")

    def block(number: int) -> None:
        begin = number * BLOCK_BYTES
        plain = whole[begin : begin + BLOCK_BYTES]
        found: memoryview | bytes = body[ends[number] : ends[number + 1]]
        if not table[number] & _STORED:
            found = _decompressed(compressor, body[ends[number] : ends[number + 1]], len(plain))
        if len(found) != len(plain):
            raise refuse(f"a block of {len(found)} bytes where {len(plain)} were expected")
        shuffled = np.frombuffer(found, np.uint8)
        if runs is None:
            plain[:] = shuffled
        else:
            unshuffle(shuffled, plain, cover(runs, begin, begin + len(plain)))

    on_all_cores(block, count)


def _decompressed(compressor: Compressor, block: memoryview, raw_bytes: int) -> bytes:
    # Blocks that do not shrink are stored, so `compress` above never makes such a length.
    if not 0 < len(block) < raw_bytes:
        raise refuse(f"a compressed block of {len(block)} bytes for {raw_bytes}")
    try:
        return compressor.decompress(block, raw_bytes)
    except RemoteProtocolError:
        raise
    except Exception as error:
        # Each library raises its own errors; only the bytes of the peer can have caused them.
        raise refuse(f"a block that cannot be decompressed: {error}") from None
