"""Compressors: compress blocks of bytes, and decompress them with an exact limit on the result.

Decompression does not trust the sender: it refuses a block that claims a longer result before it allocates
memory. Errors that a library raises on garbage reach the caller, which knows the peer.
"""

from __future__ import annotations

import zlib
from typing import Protocol, runtime_checkable

import lz4.block
import lz4.frame
import zstandard

from w5xde.errors import RemoteProtocolError

# Large enough to compress well, small enough that a vector gives work to every core.
BLOCK_BYTES = 1 << 20


@runtime_checkable
class Compressor(Protocol):
    """A stage that compresses one block. Several threads call it at once."""

    def compress(self, block: memoryview) -> bytes: ...

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        """The decompressed block; the caller checks that it is exactly `raw_bytes` long."""
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
        # One byte more than allowed, or zlib stops at the last one and never checks the checksum.
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
    """The file format of lz4, with a header and a checksum."""

    def compress(self, block: memoryview) -> bytes:
        compressed: bytes = lz4.frame.compress(
            block, block_size=lz4.frame.BLOCKSIZE_MAX1MB, content_checksum=True, store_size=True
        )
        return compressed

    def decompress(self, block: memoryview, raw_bytes: int) -> bytes:
        claims = lz4.frame.get_frame_info(block)
        # The library allocates inner blocks of the size that the header claims.
        if claims["skippable"] or claims["content_size"] != raw_bytes or claims["block_size"] > BLOCK_BYTES:
            raise refuse("an lz4 frame of another size than expected")
        stream = lz4.frame.LZ4FrameDecompressor()
        found: bytes = stream.decompress(block, max_length=raw_bytes + 1)
        if not stream.eof or stream.unused_data:
            raise refuse("an lz4 frame that does not end where it should")
        return found


class Zstd:
    """zstd. Its contexts are large and serve one call at a time, so they are kept for later calls."""

    def __init__(self, level: int) -> None:
        self._level = level
        # Lists, because pop and append are atomic: threads share them without a lock.
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
        claims = zstandard.get_frame_parameters(block)
        # The library allocates what the header claims, so check the header first.
        if claims.content_size != raw_bytes or claims.window_size > BLOCK_BYTES or claims.dict_id:
            raise refuse("a zstd frame of another size than expected")
        try:
            context = self._decompressors.pop()
        except IndexError:
            context = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        found = context.decompress(block, max_output_size=raw_bytes, allow_extra_data=False)
        # Only after a success: a failure may leave its context in the middle of a frame.
        self._decompressors.append(context)
        return found
