"""Packed epochs: batches of plain tensors, packed by one copy for each epoch.

To read and pack a batch of a small `TensorDataset` takes longer than a small model needs to compute it. Here
the samples are copied into the epoch's order at once, so that a batch is a slice of each tensor's bytes. The
bytes are those that `Packer` gives. Does not know when batches are asked for.
"""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from w5xde.learn.data.payload import Packed, pack_batch, padding_of
from w5xde.learn.data.sources import MapSource, Source

# Copying this much in each epoch takes a few hundredths of a second; larger data is read batch by batch.
DATA_BYTES_MAX = 64 * 1024 * 1024
# Numpy has them all.
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)


class PackedEpochs:
    """Packed batches of a source by epoch and number."""

    def __init__(self, source: MapSource) -> None:
        self._source = source
        self._tensors: list[torch.Tensor] = list(source.dataset.tensors)
        self._sample_bytes = [tensor[0].numel() * tensor.element_size() for tensor in self._tensors]
        # A packed batch for each size, whose tensors are replaced.
        self._templates: dict[int, Packed] = {}
        # The bytes of each tensor in the order of an epoch.
        self._epochs: dict[int, list[memoryview]] = {}

    @classmethod
    def of(cls, source: Source) -> PackedEpochs | None:
        """The packed epochs of a source that is small and only holds tensors; None for any other."""
        if not isinstance(source, MapSource) or source.recipe.collate is not None:
            return None
        return cls(source) if _is_small(source) else None

    def batch(self, epoch: int, batch: int) -> Packed:
        ordered = self._epochs.get(epoch) or self._order(epoch)
        places = self._source.epoch(epoch).places(batch)
        template = self._templates.get(len(places)) or self._pack(len(places))
        pieces = []
        for raw, size in zip(ordered, self._sample_bytes, strict=True):
            pieces.append(raw[places.start * size : places.stop * size])
            padding = padding_of(len(places) * size)
            if padding:
                pieces.append(memoryview(bytes(padding)))
        return Packed(template.samples, template.item, pieces, template.body_bytes)

    def _order(self, epoch: int) -> list[memoryview]:
        order = self._source.epoch(epoch).indices
        # Late batches of the epoch before may still be lent again.
        self._epochs = {known: raw for known, raw in self._epochs.items() if known >= epoch - 1}
        ordered = self._epochs[epoch] = [
            tensor[order].reshape(-1).view(torch.uint8).numpy().data for tensor in self._tensors
        ]
        return ordered

    def _pack(self, samples: int) -> Packed:
        packed = self._templates[samples] = pack_batch(samples, [each[:samples] for each in self._tensors])
        return packed


def _is_small(source: MapSource) -> bool:
    """Whether every epoch of a source is small, and holds plain tensors."""
    dataset, samples = source.dataset, source.epoch_samples
    if type(dataset) is not TensorDataset or samples is None:  # a subclass may do more when it is read
        return False
    # A sampler may draw samples more than once.
    times = max(1.0, samples / source.samples)
    return sum(times * tensor.nbytes for tensor in dataset.tensors) <= DATA_BYTES_MAX and all(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype in _DTYPES
        and not tensor.requires_grad
        for tensor in dataset.tensors
    )
