"""Error feedback: what rounding to 8 bits takes from one update is sent with the next.

For int8 only. bf16 and fp16 are off by 2^-8 and 2^-11 of a value, far below the noise of a gradient, and the
passes over memory that remembering takes would cost more than that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from w5xde.learn.codecs.numbers import values_of
from w5xde.learn.codecs.pipeline import Pipeline
from w5xde.learn.model.layout import DtypeGroup


class ErrorFeedback:
    """Encodes the updates of one sender, so that over time their sum arrives to within one rounding."""

    def __init__(self, groups: Sequence[DtypeGroup]) -> None:
        self._groups = groups
        # What the receiver has not got yet, laid out like the updates; None: nothing.
        self._owed: Tensor | None = None

    def encode(self, pipeline: Pipeline, raw: Tensor) -> list[memoryview]:
        """The update and what was owed, which is added to `raw` itself."""
        if self._owed is not None:
            for group in self._floats():
                values_of(raw, group).add_(values_of(self._owed, group))
        if not pipeline.is_coarse:
            self._owed = None
            return pipeline.encode(raw, self._groups)
        packed = pipeline.pack(raw, self._groups)
        if self._owed is None:
            self._owed = torch.empty_like(raw)
        pipeline.unpack(packed, self._owed, self._groups)
        for group in self._floats():
            owed = values_of(self._owed, group)
            # A gradient that is not finite is refused by the receiver; the next must not inherit it.
            torch.sub(values_of(raw, group), owed, out=owed).nan_to_num_(0, 0, 0)
        return pipeline.compress(packed, self._groups)

    def _floats(self) -> list[DtypeGroup]:
        return [group for group in self._groups if group.dtype in (torch.float32, torch.float64)]
