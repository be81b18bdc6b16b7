"""Canary weights: parameters by a formula, the same on every machine and spread like the model's own.

`clip(mean + std * noise, low, high)` with noise from one table of pseudo-random numbers. Two machines compute
on equal weights without sending them: only four numbers for each tensor travel. Knows nothing of batches,
gradients or nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from w5xde.learn.model.layout import DTYPES, FlatModel
from w5xde.message_types import Fill
from w5xde.messages import FROZEN, TRAINED, Entry, Layout

# A prime, so that the rows of a weight do not repeat with the table.
_TABLE = 8191
_SEED = 4
# The distance in the table between where one tensor begins and the next.
_STRIDE = 7919
# Half the width of a uniform distribution with a standard deviation of one.
_HALF_WIDTH = math.sqrt(3.0)
# The spread of a parameter that is constant when it is built (a bias of zeros, a norm's ones): zeros in the
# last layer of a branch, which are common, would leave everything before it without a gradient.
_SPREAD_OF_ZERO = 0.02
_SPREAD = 0.05
# This many first numbers of a parameter are enough to measure its spread.
_MEASURED = 1 << 20


@lru_cache(maxsize=1)
def _noise() -> Tensor:
    """Return uniform noise with mean 0 and standard deviation 1."""
    generator = torch.Generator().manual_seed(_SEED)
    # Integers that a double holds exactly, drawn one after the other: the same on every machine.
    drawn = torch.randint(0, 2**24, (_TABLE,), generator=generator).double()
    return (drawn * 2.0**-23 - 1.0) * _HALF_WIDTH


def fills_of(flat: FlatModel) -> list[Fill | None]:
    """Return how to fill each entry of the layout; None if it stays as built, or its values travel."""
    return [
        _fill_of(tensor, is_trained=entry.role == TRAINED) if _is_filled(entry) else None
        for entry, tensor in zip(flat.blueprint.layout.entries, flat.tensors, strict=True)
    ]


def fits(fills: Sequence[Fill | None], layout: Layout) -> bool:
    """Return whether these fills, which a coordinator sent, are for entries that may be filled."""
    return len(fills) == len(layout.entries) and all(
        fill is None or _is_filled(entry) for fill, entry in zip(fills, layout.entries, strict=True)
    )


def _is_filled(entry: Entry) -> bool:
    """Return whether the entry is a parameter: moving buffers travel, and still ones stay as built."""
    dtype = DTYPES[entry.dtype]
    is_wide = dtype.is_floating_point or dtype.is_complex
    return entry.role in (TRAINED, FROZEN) and is_wide and 0 not in entry.shape


def _fill_of(tensor: Tensor, *, is_trained: bool) -> Fill | None:
    values = _real(tensor.detach().reshape(-1)[:_MEASURED]).double()
    mean, std = float(values.mean()), float(values.std(correction=0))
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(mean) or not math.isfinite(std):
        return None
    if is_trained and low == high:
        std = _SPREAD * abs(mean) if mean else _SPREAD_OF_ZERO
        low, high = mean - 2 * std, mean + 2 * std
    return Fill(mean, std, low, high)


def write(flat: FlatModel, fills: Sequence[Fill | None], *, nudge: float = 0.0) -> None:
    """Fill the model's parameters; with `nudge` each value changes by this fraction of itself."""
    for at, fill in enumerate(fills):
        if fill is None:
            continue
        noise = _noise().roll(at * _STRIDE)
        # Two operations, not one: fused they would be rounded once on some machines and twice on others.
        values = noise.mul(fill.std).add_(fill.mean).clamp_(fill.low, fill.high)
        if nudge:
            values.mul_(1.0 + nudge * noise.roll(_STRIDE // 2).sign())
        _repeat(_real(flat.place(at)).view(-1), values)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()).reshape(-1) if tensor.is_complex() else tensor


def _repeat(place: Tensor, values: Tensor) -> None:
    """Repeat the values until the place is full."""
    ready = values.to(place.dtype).to(place.device)
    whole = place.numel() // _TABLE
    place[: whole * _TABLE].view(whole, _TABLE).copy_(ready)
    place[whole * _TABLE :].copy_(ready[: place.numel() - whole * _TABLE])
