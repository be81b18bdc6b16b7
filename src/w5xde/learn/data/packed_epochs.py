"""Batches of plain tensors, packed by the epoch: one copy in the epoch's order, then only slices.

Reading and packing a batch of a small `TensorDataset` costs more than a small model takes to compute it.
Here the samples are put into the epoch's order at once, so that a batch is a slice of each tensor's bytes,
and its description is the same for all batches of one size. What is sent is the very same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.data import TensorDataset

from w5xde.learn.data.payload import Packed, Packer, padding_of
from w5xde.learn.data.sources import MapSource, Source
from w5xde.messages import Item

# Data up to this is worth copying anew in each epoch; beyond it batches are read one by one.
DATA_BYTES_MAX = 64 * 1024 * 1024


class _Described(NamedTuple):
    """All batches of so many samples."""

    item: Item
    body_bytes: int
    # What follows each tensor.
    paddings: list[memoryview]


class PackedEpochs:
    """Packed batches of a source by (epoch, batch)."""

    def __init__(self, source: MapSource, batch_size: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self._tensors: list[torch.Tensor] = list(source.dataset.tensors)
        # What one sample takes of each, and how a batch of so many samples is described.
        self._sample_bytes = [tensor[0].numel() * tensor.element_size() for tensor in self._tensors]
        self._described: dict[int, _Described] = {}
        self._epochs: dict[int, list[memoryview]] = {}

    @classmethod
    def of(cls, source: Source, batch_size: int) -> PackedEpochs | None:
        """For a source that is that plain, and small; None for any other."""
        return cls(source, batch_size) if isinstance(source, MapSource) and _suits(source) else None

    def batch(self, epoch: int, batch: int) -> Packed:
        ordered = self._epochs.get(epoch) or self._order(epoch)
        start = batch * self._batch_size
        samples = min(self._batch_size, self._source.samples - start)
        described = self._described.get(samples) or self._describe(samples)
        stop = start + samples
        pieces = []
        for raw, size, padding in zip(ordered, self._sample_bytes, described.paddings, strict=True):
            pieces.append(raw[start * size : stop * size])
            if padding:
                pieces.append(padding)
        return Packed(samples, described.item, pieces, described.body_bytes)

    def _order(self, epoch: int) -> list[memoryview]:
        order = self._source.order(epoch)
        # Late batches of the epoch before may still be lent again.
        self._epochs = {known: raw for known, raw in self._epochs.items() if known >= epoch - 1}
        ordered = self._epochs[epoch] = [
            tensor[order].reshape(-1).view(torch.uint8).numpy().data for tensor in self._tensors
        ]
        return ordered

    def _describe(self, samples: int) -> _Described:
        packer = Packer()
        item = packer.pack([tensor[:samples] for tensor in self._tensors])
        paddings = [memoryview(bytes(padding_of(samples * size))) for size in self._sample_bytes]
        described = self._described[samples] = _Described(item, packer.body_bytes, paddings)
        return described


def _suits(source: MapSource) -> bool:
    dataset = source.dataset
    if type(dataset) is not TensorDataset:  # a subclass may do more when it is read
        return False
    return sum(tensor.nbytes for tensor in dataset.tensors) <= DATA_BYTES_MAX and all(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)
        and not tensor.requires_grad
        for tensor in dataset.tensors
    )
