"""Error feedback: adds the rounding error of one int8 or q4 update to the next update.

For these only. bf16 and fp16 are off by 2^-8 and 2^-11 of a value, far below the noise of a gradient, so
keeping their errors would cost more passes over memory than it is worth. Knows no receivers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from w5xde.learn.codecs.numbers import NARROWED
from w5xde.learn.codecs.pipeline import CodecPipeline
from w5xde.learn.model.layout import DtypeGroup
from w5xde.messages import CARRIED


class ErrorFeedback:
    """Encodes the updates of one sender, so that in the long run their sum arrives to within one rounding."""

    def __init__(self, groups: Sequence[DtypeGroup]) -> None:
        self._groups = groups
        # Carried statistics replace the older ones, so nothing of them is owed: added to the next ones, their
        # error could make those negative.
        self._floats = [group for group in groups if group.dtype in NARROWED and group.role != CARRIED]
        # The rounding error that the receiver has not got yet, laid out like an update; None: none.
        self._owed: Tensor | None = None

    def encode(self, pipeline: CodecPipeline, raw: Tensor) -> list[memoryview]:
        """The encoded update. Adds the owed rounding error to `raw` itself first."""
        if self._owed is not None:
            for group in self._floats:
                group.values_in(raw).add_(group.values_in(self._owed))
        if not pipeline.is_coarse:
            self._owed = None
            return pipeline.encode(raw, self._groups)
        packed = pipeline.pack(raw, self._groups)
        if self._owed is None:
            self._owed = torch.empty_like(raw)
        pipeline.unpack(packed, self._owed, self._groups)
        for group in self._floats:
            owed = group.values_in(self._owed)
            # The receiver rejects a gradient that is not finite; the next gradient must not inherit it.
            torch.sub(group.values_in(raw), owed, out=owed).nan_to_num_(0, 0, 0)
        return pipeline.compress(packed, self._groups)
