"""Compressors: blocks of bytes made smaller, and made again with an exact limit on what may come out.

Whoever decompresses does not trust the sender: a block that would become longer than it must be is refused
before memory is given to it. What a library raises on garbage is left to the caller, who knows the peer.
"""

from __future__ import annotations

import zlib
from typing import Protocol, runtime_checkable

import lz4.block
import lz4.frame
import zstandard

from w5xde.errors import RemoteProtocolError

BLOCK_BYTES = 1 << 20


@runtime_checkable
class Compressor(Protocol):
    """A stage that makes a block smaller. Called from several threads at once."""

    def compress(self, block: memoryview) -> bytes: ...

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        """What was compressed; the caller checks that it is exactly `raw_bytes` long, never more."""
        ...


def refuse(what: str) -> RemoteProtocolError:
    return RemoteProtocolError(what, code="W5-122")


class Zlib:
    def __init__(self, level: int) -> None:
        self._level = level

    def compress(self, block: memoryview) -> bytes:
        return zlib.compress(block, self._level)

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        stream = zlib.decompressobj()
        # One byte more than may come, or zlib stops at the last one and never looks at the checksum.
        found = stream.decompress(block, raw_bytes + 1)
        if not stream.eof or stream.unused_data:
            raise refuse("a zlib block that does not end where it should")
        return found


class Lz4:
    def __init__(self, acceleration: int) -> None:
        self._acceleration = acceleration

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = lz4.block.compress(
            block, mode="fast", acceleration=self._acceleration, store_size=False
        )
        return compressed

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        found: bytes = lz4.block.decompress(block, uncompressed_size=raw_bytes)
        return found


class Lz4Frame:
    """The same with a header and a checksum of its own, as files have it."""

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = lz4.frame.compress(
            block, block_size=lz4.frame.BLOCKSIZE_MAX1MB, content_checksum=True, store_size=True
        )
        return compressed

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        says = lz4.frame.get_frame_info(block)
        # The size of its inner blocks is what the library allocates for them.
        if says["skippable"] or says["content_size"] != raw_bytes or says["block_size"] > BLOCK_BYTES:
            raise refuse("an lz4 frame of another size than expected")
        stream = lz4.frame.LZ4FrameDecompressor()
        found: bytes = stream.decompress(block, max_length=raw_bytes + 1)
        if not stream.eof or stream.unused_data:
            raise refuse("an lz4 frame that does not end where it should")
        return found


class Zstd:
    """zstd's contexts are large and belong to one call at a time: they are kept and used again."""

    def __init__(self, level: int) -> None:
        self._level = level
        # Lists, because taking from one and giving back is atomic: threads share them without a lock.
        self._compressors: list[zstandard.ZstdCompressor] = []
        self._decompressors: list[zstandard.ZstdDecompressor] = []

    def compress(self, block: memoryview) -> bytes:
        try:
            context = self._compressors.pop()
        except IndexError:
            context = zstandard.ZstdCompressor(level=self._level, write_content_size=True)
        compressed = context.compress(block)
        self._compressors.append(context)
        return compressed

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        says = zstandard.get_frame_parameters(block)
        # The library believes the header and allocates what it says, so it is read first.
        if says.content_size != raw_bytes or says.window_size > BLOCK_BYTES or says.dict_id:
            raise refuse("a zstd frame of another size than expected")
        try:
            context = self._decompressors.pop()
        except IndexError:
            context = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        found = context.decompress(block, max_output_size=raw_bytes, allow_extra_data=False)
        # Only after a block that was right: one that failed may have left its context in the middle.
        self._decompressors.append(context)
        return found
