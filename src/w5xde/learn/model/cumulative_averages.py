"""Cumulative averages: buffers that are the mean over all forward passes, as in BatchNorm(momentum=None).

Batches of one step start from the same buffers, so the change that each makes to such a mean has the weight
of one pass among those before the step. The mean of these changes would give the passes of later steps too
little weight. So an update carries the *sum* of the values that its batches averaged, and the mean over all
passes follows from it, in whatever order updates come. Knows no gradients and no steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from w5xde.learn.model.layout import DTYPES, Blueprint
from w5xde.messages import MOVING, TRAINED

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Place(NamedTuple):
    """A buffer in the parts of a vector that hold buffers: which part, and which of its values."""

    part: int
    values: slice

    def of(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[self.part][self.values]


class CumulativeAverages:
    """Where a model's cumulative averages lie. All methods take the buffer parts of vectors."""

    def __init__(self, module: nn.Module, blueprint: Blueprint) -> None:
        places = dict(_places_in(blueprint))
        # The counter of passes, and the averages over them.
        self._averages: list[tuple[_Place, list[_Place]]] = []
        for path, each in module.named_modules():
            if isinstance(each, _BATCH_NORMS) and each.momentum is None:
                names = [f"{path}.{name}" if path else name for name in _BUFFERS]
                # A layer without statistics has none of them; one that never changes may have still ones.
                if places.keys() >= set(names):
                    counter, *averages = (places[name] for name in names)
                    self._averages.append((counter, averages))

    def values(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Copies of all averages, or of what stands in their places."""
        return [place.of(parts).clone() for _, averages in self._averages for place in averages]

    def write(self, parts: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Set all averages."""
        places = [place for _, averages in self._averages for place in averages]
        for place, value in zip(places, values, strict=True):
            place.of(parts).copy_(value)

    def make_sums(self, changes: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Turn the changes of averages into the sums of the values that were averaged; `before`: the buffers.

        m passes change the mean r of n passes by (s - m r) / (n + m), where s is the sum.
        """
        for counter, averages in self._averages:
            added, count = counter.of(changes), counter.of(before)
            for place in averages:
                place.of(changes).mul_(count + added).add_(place.of(before) * added)

    def advanced(self, state: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
        """The averages over the passes of `state`, and those that `sums` counts and adds."""
        found = []
        for counter, averages in self._averages:
            added, count = int(counter.of(sums)), int(counter.of(state))
            for place in averages:
                mean = place.of(state).clone()
                if added > 0:
                    mean.copy_((mean.double() * count + place.of(sums).double()) / (count + added))
                found.append(mean)
        return found


_BUFFERS = ("num_batches_tracked", "running_mean", "running_var")


def _places_in(blueprint: Blueprint) -> list[tuple[str, _Place]]:
    """The name and place of every moving buffer."""
    found = []
    first = sum(group.role == TRAINED for group in blueprint.moving_groups)
    for number, group in enumerate(blueprint.moving_groups):
        for i in group.entries if group.role == MOVING else ():
            entry = blueprint.layout.entries[i]
            start = (blueprint.offsets[i] - group.start) // DTYPES[entry.dtype].itemsize
            place = _Place(number - first, slice(start, start + math.prod(entry.shape)))
            found.append((entry.name, place))
    return found
