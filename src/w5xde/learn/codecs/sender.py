"""The sender: encodes vectors for one direction of one peer, by a fixed spec or by the best measured one.

With `auto` it tries all candidates now and then on a sample of the real payload, and asks a `Choice`, which
the runtime passes in, which of them pays. Knows no links; its clock is passed in too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from w5xde.compression import AUTO, AUTO_LOSSY, NONE, parse_spec, refuse_down
from w5xde.learn.codecs.feedback import ErrorFeedback
from w5xde.learn.codecs.pipeline import CodecPipeline, parse
from w5xde.learn.model.layout import ALIGNMENT_BYTES, DtypeGroup

# A payload that fits a few packets gains nothing from a codec: `auto` never encodes it.
SMALL_BYTES = 4096
# The sample: stripes from all over the payload, because the gradient of an embedding is mostly zeros and
# others are not.
_STRIPES = 8
_STRIPE_BYTES = 64 * 1024
# The better of two trials counts: one alone often includes a cold start, or the time of another process.
_TRIALS = 2

LOSSLESS = (NONE, "lz4", "zstd:1", "shuffle | lz4", "shuffle | zstd:1")
LOSSY = ("bf16", "bf16 | shuffle | zstd:1", "int8", "int8 | zstd:1")


def is_never_encoded(setting: str, vector_bytes: int) -> bool:
    """Whether vectors of this size always travel raw under this setting."""
    return setting == NONE or (setting in (AUTO, AUTO_LOSSY) and vector_bytes < SMALL_BYTES)


class Choice(Protocol):
    """Chooses a spec by measured costs; `control.codec_choice.CodecChoice` implements it."""

    def is_due(self, now: float) -> bool: ...

    def measuring_begun(self, now: float) -> None: ...

    def measured(
        self, spec: str, raw_bytes: int, encoded_bytes: int, encode_seconds: float, decode_seconds: float
    ) -> None: ...

    def pick(self, raw_bytes: int) -> str: ...

    def reason(self) -> str:
        """Why the spec that was picked last was picked."""


class Encoded(NamedTuple):
    """An encoded vector, its spec, and the seconds that encoding took."""

    spec: str
    pieces: list[memoryview]
    encoded_bytes: int
    seconds: float


class CodecSender:
    """Encodes the vectors of one layout for one direction (`up`: gradients, `down`: parameters)."""

    def __init__(
        self,
        setting: str,
        direction: Literal["up", "down"],
        groups: Sequence[DtypeGroup],
        choice: Choice,
        clock: Callable[[], float],
        *,
        feeds_back: bool = True,
    ) -> None:
        """`feeds_back`: the rounding errors of coarse codecs are added to the next vector."""
        self._groups = groups
        self._choice = choice
        self._clock = clock
        self._fixed: CodecPipeline | None = None
        if setting not in (AUTO, AUTO_LOSSY):
            if direction == "down":
                refuse_down(parse_spec(setting))
            self._fixed = parse(setting)
        specs = LOSSLESS + (LOSSY if setting == AUTO_LOSSY else ())
        self._candidates = [
            pipeline for pipeline in map(parse, specs) if direction == "up" or not pipeline.is_coarse
        ]
        self._feedback = ErrorFeedback(groups) if feeds_back else None
        # The spec that was chosen last.
        self.spec = NONE
        # Seconds to decode a byte, by spec, as measured here: the receiver does not report its own.
        self._decoding: dict[str, float] = {}

    def encode(self, raw: Tensor, now: float) -> Encoded:
        """The encoded vector. Adds owed rounding errors to `raw`; the pieces may be views of it."""
        raw_bytes = raw.numel()
        pipeline = self.choose(raw, now)
        begun = self._clock()
        feedback = self._feedback
        pieces = feedback.encode(pipeline, raw) if feedback else pipeline.encode(raw, self._groups)
        seconds = self._clock() - begun
        encoded_bytes = sum(map(len, pieces))
        decoding = self._decoding.get(pipeline.spec)
        if decoding is not None and pipeline.spec != NONE:
            # The real cost: a sample fits the cache and one core, and the payload may not.
            self._choice.measured(pipeline.spec, raw_bytes, encoded_bytes, seconds, raw_bytes * decoding)
        return Encoded(pipeline.spec, pieces, encoded_bytes, seconds)

    def choose(self, raw: Tensor, now: float) -> CodecPipeline:
        """The pipeline for a vector like this one."""
        if self._fixed is not None:
            chosen = self._fixed
        elif raw.numel() < SMALL_BYTES:
            chosen = parse(NONE)
        else:
            if self._choice.is_due(now):
                self._measure(raw, now)
            chosen = parse(self._choice.pick(raw.numel()))
        self.spec = chosen.spec
        return chosen

    @property
    def reason(self) -> str:
        """Why the last vector was encoded as it was."""
        return "set by --compress" if self._fixed is not None else self._choice.reason()

    def _measure(self, raw: Tensor, now: float) -> None:
        self._choice.measuring_begun(now)
        # A small sample too: the difference gives the cost of a call that does not depend on its bytes.
        samples = [
            sample(raw, self._groups, 1, SMALL_BYTES),
            sample(raw, self._groups, _STRIPES, _STRIPE_BYTES),
        ]
        for pipeline in self._candidates:
            for part, groups in samples:
                self._try(pipeline, part, groups)

    def _try(self, pipeline: CodecPipeline, raw: Tensor, groups: Sequence[DtypeGroup]) -> None:
        # With error feedback, as in earnest; on a copy, because encoding adds the owed error to its input.
        raw, target, feedback = raw.clone(), torch.empty_like(raw), ErrorFeedback(groups)
        encode_seconds = decode_seconds = float("inf")
        body = bytearray()
        for _ in range(_TRIALS):
            begun = self._clock()
            pieces = feedback.encode(pipeline, raw)
            encoded = self._clock()
            body = bytearray().join(pieces)
            joined = self._clock()
            pipeline.decode(body, target, groups)
            decode_seconds = min(decode_seconds, self._clock() - joined)
            encode_seconds = min(encode_seconds, encoded - begun)
        self._decoding[pipeline.spec] = decode_seconds / raw.numel()
        self._choice.measured(pipeline.spec, raw.numel(), len(body), encode_seconds, decode_seconds)


def sample(
    raw: Tensor, groups: Sequence[DtypeGroup], stripes: int, stripe_bytes: int
) -> tuple[Tensor, list[DtypeGroup]]:
    """Stripes from all over a vector, as a smaller vector with its groups; all of it if it is short."""
    if raw.numel() <= stripes * stripe_bytes:
        return raw, list(groups)
    last = (raw.numel() - stripe_bytes) // ALIGNMENT_BYTES
    begins = [(last * (2 * number + 1) // (2 * stripes)) * ALIGNMENT_BYTES for number in range(stripes)]
    found: list[DtypeGroup] = []
    for number, begin in enumerate(begins):
        for group in groups:
            size = group.dtype.itemsize
            first = max(group.start, begin)
            end = min(group.end, begin + stripe_bytes)
            if first < end:
                start, count = number * stripe_bytes + first - begin, (end - first) // size
                before = found[-1] if found else None
                # Join neighbours of one dtype, or the cost of each group would be counted as a cost of bytes.
                if before and before.dtype == group.dtype and before.end == start:
                    found[-1] = replace(before, count=before.count + count)
                else:
                    found.append(replace(group, start=start, count=count, entries=()))
    return torch.cat([raw[begin : begin + stripe_bytes] for begin in begins]), found
