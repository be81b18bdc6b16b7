"""A sketch of a tensor: its norm and sixteen sums with pseudo-random signs, 136 bytes for any tensor.

The sums of a difference are about as large as the difference, so tensors on two machines are compared by
their sketches. The signs matter because plain sums cancel: gradients over the classes of a softmax add up to
zero. Knows nothing of models or nodes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

SUMS = 16
ROW = 1 + SUMS
# Signs repeat along rows and columns of prime lengths, so that they do not repeat with a tensor's shape.
_COLUMNS, _ROWS = 4099, 4093
# This many rows at a time are converted to doubles: 2 MiB beside the tensor.
_ROWS_AT_ONCE = 64
_SEED = 5


@lru_cache(maxsize=1)
def _signs() -> tuple[Tensor, Tensor, Tensor]:
    """Return the signs of rows, the signs of columns, and the sum that each column belongs to."""
    generator = torch.Generator().manual_seed(_SEED)
    # randint draws one number after the other: the same on every kind of machine.
    drawn = [torch.randint(0, 2, (count,), generator=generator) for count in (_ROWS, _COLUMNS)]
    rows, columns = [2.0 * each.double() - 1.0 for each in drawn]
    return rows, columns, torch.randint(0, SUMS, (_COLUMNS,), generator=generator)


def sketch(tensor: Tensor | None) -> Tensor:
    """Return the norm of a tensor and its sums, as doubles; all zeros for a missing gradient."""
    row = torch.zeros(ROW, dtype=torch.float64)
    if tensor is None or not tensor.numel():
        return row
    signs, column_signs, sums = _signs()
    plain = tensor.detach()
    values = (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
    columns = torch.zeros(_COLUMNS, dtype=torch.float64)
    square = 0.0
    for begin in range(0, values.numel(), _COLUMNS * _ROWS_AT_ONCE):
        piece = values[begin : begin + _COLUMNS * _ROWS_AT_ONCE].to("cpu").double()
        square += float(piece.dot(piece))
        whole, rest = divmod(len(piece), _COLUMNS)
        first = begin // _COLUMNS
        chosen = signs[torch.arange(first, first + whole + 1) % _ROWS]
        if whole:
            columns += chosen[:whole] @ piece[: whole * _COLUMNS].view(whole, _COLUMNS)
        columns[:rest] += chosen[whole] * piece[whole * _COLUMNS :]
    row[0] = square**0.5
    row[1:].index_add_(0, sums, columns.mul_(column_signs))
    return row
