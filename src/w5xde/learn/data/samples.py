"""Samples as bytes: a batch taken apart into its samples, hashed one by one, and put together again.

A sample's bytes are its rows in every tensor of the batch, one after the other. A batch that is put together
from samples has the bytes that `Packer` gave it. Knows no sockets and no files.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from w5xde.learn.data.payload import Packed, leaves_of, padding_of
from w5xde.learn.model.layout import DTYPES
from w5xde.message_types import DIGEST_BYTES, Container, Item, SampleList, TensorAt

ByteRows: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[np.uint32]
Choice: TypeAlias = NDArray[np.bool_]

# A number takes four bytes on the wire.
NUMBERED_MAX = 2**32
_NUMBER = np.dtype("<u4")


class SampleFormat:
    """The tensors of a batch as samples see them: for each its bytes in one sample."""

    def __init__(self, item: Item, samples: int, sizes: list[int]) -> None:
        """Callers use `of`, which refuses items that have no such form."""
        self._item = item
        self._samples = samples
        self._sizes = sizes
        self._items: dict[int, Item] = {}
        self.sample_bytes = sum(sizes)

    @classmethod
    def of(cls, item: Item, samples: int) -> SampleFormat | None:
        """The format of a batch of this many samples.

        None if its tensors do not have a row for each sample or lie elsewhere than `Packer` puts them, if
        it holds anything but tensors, or if the samples have no bytes.
        """
        sizes: list[int] = []
        at = 0
        for leaf in leaves_of(item):
            dtype = DTYPES.get(leaf.dtype) if isinstance(leaf, TensorAt) else None
            if not isinstance(leaf, TensorAt) or dtype is None or leaf.requires_grad or leaf.offset != at:
                return None
            if not samples or not leaf.shape or leaf.shape[0] != samples:
                return None
            sizes.append(math.prod(leaf.shape[1:]) * dtype.itemsize)
            at += samples * sizes[-1] + padding_of(samples * sizes[-1])
        return cls(item, samples, sizes) if sum(sizes) else None

    def item(self, samples: int) -> Item:
        """The description of a batch of this many samples."""
        if samples not in self._items:
            if len(self._items) > 1:  # a run has full batches, and the last one of an epoch
                self._items.clear()
            self._items[samples], _ = _resized(self._item, samples, 0, iter(self._sizes))
        return self._items[samples]

    def body_bytes(self, samples: int) -> int:
        return sum(samples * size + padding_of(samples * size) for size in self._sizes)

    def split(self, packed: Packed) -> ByteRows | None:
        """The bytes of each sample of a batch; None if the batch has another format."""
        if packed.item != self.item(packed.samples):
            return None
        rows = np.empty((packed.samples, self.sample_bytes), np.uint8)
        pieces, at = iter(packed.pieces), 0
        for size in self._sizes:
            column = np.frombuffer(next(pieces), np.uint8)
            if padding_of(column.nbytes):
                next(pieces)
            rows[:, at : at + size] = column.reshape(packed.samples, size)
            at += size
        return rows

    def join(self, rows: ByteRows) -> bytearray:
        """The body of the batch that these samples make."""
        body = bytearray(self.body_bytes(len(rows)))
        whole = np.frombuffer(body, np.uint8)
        at = place = 0
        for size in self._sizes:
            count = len(rows) * size
            whole[place : place + count].reshape(len(rows), size)[:] = rows[:, at : at + size]
            at, place = at + size, place + count + padding_of(count)
        return body


def _resized(item: Item, samples: int, at: int, sizes: Any) -> tuple[Item, int]:
    """The item for another number of samples, and where its bytes end."""
    if isinstance(item, TensorAt):
        count = samples * next(sizes)
        return TensorAt(item.dtype, (samples, *item.shape[1:]), at), at + count + padding_of(count)
    if not isinstance(item, Container):
        return item, at
    parts = []
    for part in item.items:
        resized, at = _resized(part, samples, at, sizes)
        parts.append(resized)
    return msgspec.structs.replace(item, items=parts), at


# --- hashes -----------------------------------------------------------------------------------------


def hashes_of(numbers: Numbers, rows: ByteRows) -> ByteRows:
    """The hash of each sample, with its number: a sample in another's place has a wrong hash."""
    found = bytearray()
    for number, row in zip(numbers.tolist(), rows, strict=True):
        made = hashlib.sha256(number.to_bytes(8, "little"))
        made.update(row)
        found += made.digest()[:DIGEST_BYTES]
    return np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)


def check_of(hashes: ByteRows) -> bytes:
    """The hash of a batch, from those of its samples."""
    return hashlib.sha256(hashes.tobytes()).digest()[:DIGEST_BYTES]


# --- lists of samples -------------------------------------------------------------------------------


def list_samples(numbers: Numbers, sent: Choice, hashes: ByteRows) -> SampleList:
    """The list of a batch's samples, of which the body holds those that are `sent`."""
    return SampleList(
        numbers.astype(_NUMBER, copy=False).tobytes(),
        bits_of(sent).tobytes() if sent.any() else b"",
        check_of(hashes),
    )


def listed_numbers(listed: SampleList) -> Numbers:
    return np.frombuffer(listed.numbers, _NUMBER)


def bits_of(chosen: Choice) -> ByteRows:
    """A bit for each choice, the lowest first."""
    return np.packbits(chosen, bitorder="little")


def chosen_of(bits: bytes, count: int, *, beyond: bool = False) -> Choice:
    """The choices that these bits say; `beyond`: the choice where there is no bit."""
    known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:count].astype(bool)
    return np.concatenate((known, np.full(count - len(known), beyond)))


class SampleSet:
    """Samples that a cache holds, of those with numbers below `size`."""

    def __init__(self, size: int, bits: bytes | bytearray | memoryview = b"") -> None:
        self.size = size
        self.bitmap = np.zeros(-(-size // 8), np.uint8)
        given = np.frombuffer(bits, np.uint8)[: len(self.bitmap)]
        self.bitmap[: len(given)] = given

    def __len__(self) -> int:
        return int(np.unpackbits(self.bitmap, bitorder="little")[: self.size].sum())

    def has(self, numbers: Numbers) -> Choice:
        """Whether each of these samples is in the set."""
        inside: Choice = numbers < self.size
        if self.size:
            places = np.where(inside, numbers, 0)
            bits = self.bitmap[places >> 3] >> (places & 7).astype(np.uint8)
            inside &= (bits & 1).astype(bool)
        return inside

    def add(self, numbers: Numbers) -> None:
        """Add those of these samples for which there is room."""
        inside = numbers[numbers < self.size]
        np.bitwise_or.at(self.bitmap, inside >> 3, (1 << (inside & 7)).astype(np.uint8))

    def discard(self, numbers: Numbers) -> None:
        inside = numbers[numbers < self.size]
        np.bitwise_and.at(self.bitmap, inside >> 3, ~(1 << (inside & 7)).astype(np.uint8))

    def update(self, other: SampleSet) -> None:
        """Add all samples of a set of the same size."""
        self.bitmap |= other.bitmap
