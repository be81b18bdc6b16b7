"""4 bits for each difference of a parameter, 8 for each statistic that an optimizer carries along: `q4`.

    trained, float32 and float64   a bfloat16 scale for every 64 values, and 4 bits for each value
    carried, float32               a byte of exponent for every 64 values, and 8 bits for each value
    every other group              exact: what a buffer counts or remembers must not be rounded

What the receiver unpacks is exact arithmetic: the same bits on every machine, with any number of threads. So
replicas that add up the same packed differences stay equal. Knows no optimizers: a group's role says it all.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.functional import pad

from w5xde.learn.codecs.numbers import NARROWED, NumberForm, PackedGroups, in_parts
from w5xde.learn.model.layout import DtypeGroup
from w5xde.messages import CARRIED, TRAINED

# One scale for this many values: 6 % more bytes than the codes alone, and an outlier costs only these their
# precision.
BLOCK_VALUES = 64
# 4 bits hold -8…7; symmetric, so that rounding has no bias towards either sign.
_CODE_MAX = 7
_CODE_ZERO = 8
# Fields of a float32: 8 bits of exponent above 23 of mantissa.
_MAGNITUDE_BITS = 0x7FFF_FFFF
_INFINITY_BITS = 0x7F80_0000
_NAN_BITS = 0x7FC0_0000
_MINUS_ZERO_BITS = -0x8000_0000
_SMALLEST_NORMAL_BITS = 0x0080_0000
# A scale has 2 bits of mantissa: a step to the next one makes it at most a quarter larger, and a product with
# a code needs 6 bits, so that it is exact.
_SCALE_SHIFT = 23 - 2
# A statistic has 3 bits of mantissa, and so a relative error of 1/16 at most. Its 5 bits of exponent reach
# down to 2^-31 of the largest in its block: in a step of Adam, to the square root of that, 2^-15.
_TINY_SHIFT = 23 - 3
_TINY_STEPS = 1 << 3
_TINY_EXPONENTS = 1 << 5
# The smallest and the largest normal number in these steps.
_TINY_MIN = 1 * _TINY_STEPS
_TINY_MAX = 255 * _TINY_STEPS - 1
# The byte of exponent of a block that was negative or not finite somewhere: that of NaN.
_EXPONENT_NAN = 255


class _Blocks(NumberForm):
    """Floats in blocks of 64, each with a scale. Packed, a group is its scales and then its codes."""

    scale_bytes: int
    code_bytes: int  # of a block

    @abstractmethod
    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The scales (as integers) and the codes (as bytes) of float32 values, whose rows are the blocks."""

    @abstractmethod
    def decode(self, scales: Tensor, codes: Tensor) -> Tensor:
        """The values of these blocks, from the bytes of their scales and codes."""

    def sizes(self, count: int) -> list[tuple[int, int]]:
        values_of_byte = BLOCK_VALUES // self.code_bytes
        return [(-(-count // BLOCK_VALUES), self.scale_bytes), (-(-count // values_of_byte), 1)]

    def narrow(self, values: Tensor, *parts: Tensor) -> None:
        def work(places: slice) -> None:
            # Zeros fill up the last block. They change no scale, and no byte of theirs alone travels.
            rows = _rows(values[places].float(), BLOCK_VALUES)
            scale, code = self.encode(rows)
            scales, codes = self._parts_at(places, parts)
            scales.view(scale.dtype).copy_(scale)
            codes.copy_(code.view(-1)[: len(codes)])

        in_parts(work, len(values))

    def widen(self, values: Tensor, *parts: Tensor) -> None:
        def work(places: slice) -> None:
            scales, codes = self._parts_at(places, parts)
            some = values[places]
            some.copy_(self.decode(scales, _rows(codes, self.code_bytes)).view(-1)[: len(some)])

        in_parts(work, len(values))

    def _parts_at(self, places: slice, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The bytes of the scales and of the codes of these values, which begin with a block."""
        first, end = places.start // BLOCK_VALUES, -(-places.stop // BLOCK_VALUES)
        scales, codes = parts
        return (
            scales[first * self.scale_bytes : end * self.scale_bytes],
            codes[first * self.code_bytes : end * self.code_bytes],
        )


def _rows(flat: Tensor, width: int) -> Tensor:
    """Blocks as rows; zeros fill up the last one."""
    missing = -len(flat) % width
    return (pad(flat, (0, missing)) if missing else flat).view(-1, width)


class _Differences(_Blocks):
    """4 bits for each value, the first of two in the low bits of their byte: a code from 1 to 15, minus 8.

    The scale is the smallest with 2 bits of mantissa that is no less than a 7th of the largest value; it is 0
    where it would be subnormal, and NaN if the block holds NaN or an infinity (or a float64 beyond float32's
    range). The value is scale · (code - 8).
    """

    scale_bytes = 2
    code_bytes = BLOCK_VALUES // 2

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        largest = (rows.view(torch.int32) & _MAGNITUDE_BITS).amax(1)
        bits = (largest.view(torch.float32) / _CODE_MAX).view(torch.int32)
        # Up to the next scale. The order of floats is that of their bits, and so is the next one.
        bits = (bits + (1 << _SCALE_SHIFT) - 1) >> _SCALE_SHIFT << _SCALE_SHIFT
        bits.masked_fill_(bits < _SMALLEST_NORMAL_BITS, 0)
        bits.masked_fill_(largest >= _INFINITY_BITS, _NAN_BITS)
        scale = bits.view(torch.float32)
        # Without a scale all codes are those of zero: finite / inf is 0, and inf / inf is NaN, made 0.
        divisor = torch.where(scale > 0, scale, torch.inf)
        # Divided, not multiplied by 1 / scale, which is rounded itself. Halves go to the even neighbour.
        found = (rows / divisor[:, None]).nan_to_num_(0).round_()
        found.clamp_(-_CODE_MAX, _CODE_MAX).add_(_CODE_ZERO)
        # Two bytes of 4 bits each, together a little-endian number: the second moves next to the first.
        pairs = found.to(torch.uint8).view(torch.int16)
        return (bits >> 16).to(torch.int16), (pairs | pairs >> 4).to(torch.uint8)

    def decode(self, scales: Tensor, codes: Tensor) -> Tensor:
        pairs = codes.to(torch.int16)
        pairs = (pairs | pairs << 4) & 0x0F0F
        values = pairs.view(torch.uint8).float().sub_(_CODE_ZERO)
        return values.mul_(scales.view(torch.bfloat16).float()[:, None])


class _Statistics(_Blocks):
    """8 bits for each value: a float with 5 bits of exponent, counted from the largest in the block, and 3 of
    mantissa, rounded to the nearest.

    The byte of the block is the exponent of its largest value as in a float32, or 255 if the block holds a
    negative value, NaN or an infinity: then it arrives as NaN. Zero is code 0. What is too small for its
    block, but is not zero, becomes the smallest number that is not.
    """

    scale_bytes = 1
    code_bytes = BLOCK_VALUES

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        bits = rows.view(torch.int32)
        bits = bits.masked_fill(bits == _MINUS_ZERO_BITS, 0)
        is_bad = (bits.amin(1) < 0) | (bits.amax(1) >= _INFINITY_BITS)
        # Halves go to the even neighbour.
        steps = (bits + ((1 << _TINY_SHIFT - 1) - 1) + (bits >> _TINY_SHIFT & 1)) >> _TINY_SHIFT
        steps.clamp_(_TINY_MIN, _TINY_MAX)
        exponent = (steps.amax(1) // _TINY_STEPS).masked_fill_(is_bad, _EXPONENT_NAN)
        codes = steps.sub_(_first_step(exponent)).clamp_min_(1).masked_fill_(bits == 0, 0)
        return exponent.to(torch.uint8), codes.to(torch.uint8)

    def decode(self, scales: Tensor, codes: Tensor) -> Tensor:
        steps = (codes + _first_step(scales.to(torch.int32))).clamp_min_(_TINY_MIN)
        bits = (steps << _TINY_SHIFT).masked_fill_(codes == 0, 0)
        return bits.masked_fill_((scales == _EXPONENT_NAN)[:, None], _NAN_BITS).view(torch.float32)


def _first_step(exponent: Tensor) -> Tensor:
    """Where the codes of each block begin, in steps from zero on; a column."""
    return ((exponent - (_TINY_EXPONENTS - 1)) * _TINY_STEPS)[:, None]


class FourBits(PackedGroups):
    """Differences in 4 bits, carried statistics in 8, and every other group exactly."""

    _differences = _Differences()
    _statistics = _Statistics()

    def form_of(self, group: DtypeGroup) -> NumberForm | None:
        if group.role == TRAINED and group.dtype in NARROWED:
            return self._differences
        if group.role == CARRIED and group.dtype is torch.float32:
            return self._statistics
        return None
