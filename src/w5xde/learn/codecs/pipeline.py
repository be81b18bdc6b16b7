"""Pipelines: encode a flat vector by a spec like `bf16 | shuffle | zstd:1`, and decode it.

Both sides know the layout, and with it the length of everything before it is sent. Decoding writes into
memory that exists already, and refuses with W5-122 a body that does not fit it exactly. Keeps nothing of the
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from w5xde.compression import COARSE, Kind, Stage, add_name, parse_spec, spell
from w5xde.learn.codecs import blocks
from w5xde.learn.codecs.compressors import Compressor, Lz4, Lz4Frame, Zlib, Zstd, refuse
from w5xde.learn.codecs.four_bits import FourBits
from w5xde.learn.codecs.numbers import NARROWED, Float16, Int8, Numbers, Run, new_bytes
from w5xde.learn.model.layout import DtypeGroup

_NUMBERS: dict[str, Numbers] = {
    "fp16": Float16(torch.float16),
    "bf16": Float16(torch.bfloat16),
    "int8": Int8(),
    "q4": FourBits(),
}
_COMPRESSORS: dict[str, Callable[[int], Compressor]] = {
    "zlib": Zlib,
    "lz4": Lz4,
    "lz4frame": lambda _: Lz4Frame(),
    "zstd": Zstd,
}


class CodecPipeline:
    """The stages of one spec."""

    __slots__ = ("_compressor", "_is_shuffled", "_numbers", "is_coarse", "spec")

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        by_kind = {stage.kind: stage for stage in stages}
        numbers, compressor = by_kind.get(Kind.NUMBERS), by_kind.get(Kind.COMPRESSOR)
        self._numbers = _NUMBERS[numbers.name] if numbers else None
        self._is_shuffled = Kind.ORDER in by_kind
        self._compressor = _COMPRESSORS[compressor.name](compressor.number or 0) if compressor else None
        self.spec = spell(stages)
        # So coarse that the rounding error must be sent later: see ErrorFeedback.
        self.is_coarse = numbers is not None and numbers.name in COARSE

    def encode(self, raw: Tensor, groups: Sequence[DtypeGroup]) -> list[memoryview]:
        """The encoded bytes in pieces, which may be views of `raw`: do not change it until they are sent."""
        return self.compress(self.pack(raw, groups), groups)

    def decode(self, body: memoryview | bytearray, raw: Tensor, groups: Sequence[DtypeGroup]) -> None:
        """Write the decoded body into `raw`; bytes that belong to no group may stay as they are.

        After a refused body, `raw` may hold anything.
        """
        view = memoryview(body)
        if self._numbers is None:
            self._decompress(view, raw.numpy(), groups)
            return
        packed_bytes = self._packed_bytes(raw.numel(), groups)
        if self._compressor is None and not self._is_shuffled:
            _require_length(view, packed_bytes)
            packed = _tensor(view)
        else:
            packed = new_bytes(packed_bytes)
            self._decompress(view, packed.numpy(), groups)
        self._numbers.unpack(packed, raw, groups)

    def encoded_bytes_max(self, raw_bytes: int, groups: Sequence[DtypeGroup]) -> int:
        """The length of the longest body; without a compressor every body is exactly this long."""
        packed_bytes = self._packed_bytes(raw_bytes, groups)
        return packed_bytes if self._compressor is None else blocks.bytes_max(packed_bytes)

    def element_layout(self, groups: Sequence[DtypeGroup]) -> list[tuple[int, torch.dtype]] | None:
        """The offset and dtype of each group in a body; None if no part of a body can be decoded alone."""
        if self._compressor is not None or self._is_shuffled:
            return None
        if self._numbers is None:
            return [(group.start, group.dtype) for group in groups]
        if not isinstance(self._numbers, Float16):
            return None
        dtypes = [self._numbers.dtype if group.dtype in NARROWED else group.dtype for group in groups]
        return [(run.start, dtype) for run, dtype in zip(self._numbers.runs(groups), dtypes, strict=True)]

    def pack(self, raw: Tensor, groups: Sequence[DtypeGroup]) -> Tensor:
        """The first half of encoding, which may round; returns `raw` itself if nothing is rounded."""
        return raw if self._numbers is None else self._numbers.pack(raw, groups)

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[DtypeGroup]) -> None:
        """Write into `raw` what the receiver will read from a packed vector."""
        if self._numbers is None:
            raw.copy_(packed)
        else:
            self._numbers.unpack(packed, raw, groups)

    def compress(self, packed: Tensor, groups: Sequence[DtypeGroup]) -> list[memoryview]:
        """The second half of encoding, which is lossless."""
        whole = packed.numpy()
        runs = self._runs(groups) if self._is_shuffled else None
        if self._compressor is not None:
            return blocks.compress(whole, self._compressor, runs)
        if runs is not None:
            whole = blocks.shuffle(whole, blocks.cover(runs, 0, len(whole)))
        return [whole.data]

    def _decompress(self, body: memoryview, whole: blocks.Bytes, groups: Sequence[DtypeGroup]) -> None:
        runs = self._runs(groups) if self._is_shuffled else None
        if self._compressor is not None:
            blocks.decompress(body, whole, self._compressor, runs)
            return
        _require_length(body, len(whole))
        if not len(body):
            return
        if runs is None:
            whole[:] = np.frombuffer(body, np.uint8)
        else:
            blocks.unshuffle(np.frombuffer(body, np.uint8), whole, blocks.cover(runs, 0, len(whole)))

    def _runs(self, groups: Sequence[DtypeGroup]) -> list[Run]:
        if self._numbers is not None:
            return self._numbers.runs(groups)
        return [Run(group.start, group.count, group.dtype.itemsize) for group in groups]

    def _packed_bytes(self, raw_bytes: int, groups: Sequence[DtypeGroup]) -> int:
        if self._numbers is None:
            return raw_bytes
        runs = self._numbers.runs(groups)
        return runs[-1].end if runs else 0


@lru_cache(maxsize=64)
def parse(spec: str) -> CodecPipeline:
    """The pipeline of a spec; ValueError if it is not a spec."""
    return CodecPipeline(parse_spec(spec))


def register(name: str, stage: Numbers | Compressor) -> None:
    """Let specs name another stage, for comparison in benchmarks; w5xde itself registers none."""
    if isinstance(stage, Compressor):
        add_name(name, Kind.COMPRESSOR)
        _COMPRESSORS[name] = lambda _: stage
    else:
        add_name(name, Kind.NUMBERS)
        _NUMBERS[name] = stage


def _require_length(body: memoryview, expected_bytes: int) -> None:
    if len(body) != expected_bytes:
        raise refuse(f"a body of {len(body)} bytes where {expected_bytes} were expected")


def _tensor(body: memoryview) -> Tensor:
    if not len(body):
        return torch.empty(0, dtype=torch.uint8)
    # torch warns about read-only memory, although nothing writes to it here.
    return torch.frombuffer(bytearray(body) if body.readonly else body, dtype=torch.uint8)
