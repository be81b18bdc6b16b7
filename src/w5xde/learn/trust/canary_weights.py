"""Parameters by a formula: the same values on every machine, of the size that the model's own have.

`clip(mean + std * noise, low, high)` with noise from one table of pseudo-random numbers. So two machines can
compute on equal weights without either sending them; four numbers for each tensor are all that travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from w5xde.learn.model.layout import DTYPES, FlatModel
from w5xde.messages import FROZEN, TRAINED, Entry, Fill, Layout

# A prime, so that no row of a weight falls into step with the table.
_TABLE = 8191
_SEED = 4
# Where each tensor begins in the table.
_STRIDE = 7919
# Half the width of a uniform distribution with a standard deviation of one.
_HALF_WIDTH = math.sqrt(3.0)
# How far a parameter that is constant when it is built (a bias of zeros, a norm's ones) is spread: with zeros
# in the wrong place (the last layer of a branch often begins so) everything before it would have no gradient.
_SPREAD_OF_ZERO = 0.02
_SPREAD = 0.05
# A parameter's first numbers say enough of its size.
_LOOKED_AT = 1 << 20


@lru_cache(maxsize=1)
def _noise() -> Tensor:
    """Uniform, with mean 0 and standard deviation 1."""
    generator = torch.Generator().manual_seed(_SEED)
    # Whole numbers that a double holds exactly, each drawn after the other: the same on every machine.
    drawn = torch.randint(0, 2**24, (_TABLE,), generator=generator).double()
    return (drawn * 2.0**-23 - 1.0) * _HALF_WIDTH


def fills_of(flat: FlatModel) -> list[Fill | None]:
    """For each entry of the layout how to fill it; None: it stays as it was built, or its values travel."""
    return [
        _fill_of(tensor, is_trained=entry.role == TRAINED) if _is_filled(entry) else None
        for entry, tensor in zip(flat.blueprint.layout.entries, flat.tensors, strict=True)
    ]


def fits(fills: Sequence[Fill | None], layout: Layout) -> bool:
    """Whether these, which somebody sent, fill nothing but what is filled."""
    return len(fills) == len(layout.entries) and all(
        fill is None or _is_filled(entry) for fill, entry in zip(fills, layout.entries, strict=True)
    )


def _is_filled(entry: Entry) -> bool:
    """Parameters are. Moving buffers travel, still ones are what the model's code makes them (a mask is)."""
    dtype = DTYPES[entry.dtype]
    is_wide = dtype.is_floating_point or dtype.is_complex
    return entry.role in (TRAINED, FROZEN) and is_wide and 0 not in entry.shape


def _fill_of(tensor: Tensor, *, is_trained: bool) -> Fill | None:
    values = _real(tensor.detach().reshape(-1)[:_LOOKED_AT]).double()
    mean, std = float(values.mean()), float(values.std(correction=0))
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(mean) or not math.isfinite(std):
        return None
    if is_trained and low == high:
        std = _SPREAD * abs(mean) if mean else _SPREAD_OF_ZERO
        low, high = mean - 2 * std, mean + 2 * std
    return Fill(mean, std, low, high)


def write(flat: FlatModel, fills: Sequence[Fill | None], *, nudge: float = 0.0) -> None:
    """Fill the model's parameters; with `nudge` each value is moved by this part of itself."""
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
    """Write the values again and again until the place is full."""
    ready = values.to(place.dtype).to(place.device)
    whole = place.numel() // _TABLE
    place[: whole * _TABLE].view(whole, _TABLE).copy_(ready)
    place[whole * _TABLE :].copy_(ready[: place.numel() - whole * _TABLE])
