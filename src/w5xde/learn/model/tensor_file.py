"""The file format safetensors, in pieces: the tensors are written from their own memory.

The library builds a file as one object in memory. These pieces are the same bytes. Knows no disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import msgspec
import torch
from safetensors.torch import save

from w5xde.learn.model.digest import bytes_of

# A piece this small is still in the cache of the CPU when it is written after it was hashed.
PIECE_BYTES = 1024 * 1024
# The format aligns the first tensor.
_HEADER_ALIGNMENT = 8


class _HeaderEntry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def safetensors_pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The content of a file with these tensors, which must not change before all pieces are used."""
    entries = _describe(tensors)
    end = 0
    for name, entry in entries.items():
        start, end = end, end + tensors[name].nbytes
        entry.data_offsets = (start, end)
    told = {"__metadata__": metadata} if metadata else {}
    header = msgspec.json.encode({**told, **entries})
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    yield struct.pack("<Q", len(header)) + header
    for name in entries:
        data: memoryview = bytes_of(tensors[name]).numpy().data
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]


def _describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, _HeaderEntry]:
    """The header that the library writes for these tensors, in its order, without their offsets."""
    # Another dimension, of length 0: everything but the numbers themselves.
    empty = save({name: torch.empty((0, *each.shape), dtype=each.dtype) for name, each in tensors.items()})
    entries = msgspec.json.decode(empty[struct.calcsize("<Q") :], type=dict[str, _HeaderEntry])
    for entry in entries.values():
        del entry.shape[0]
    return entries
