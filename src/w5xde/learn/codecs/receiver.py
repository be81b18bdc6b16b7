"""The receiver: which specs a peer may use, and the vectors they stand for.

What the other side says is checked against what the run allows before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from w5xde.compression import AUTO, AUTO_LOSSY, NONE
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.sender import LOSSLESS, LOSSY
from w5xde.learn.model.layout import DtypeGroup


class CodecReceiver:
    """Decodes vectors of one layout that come by one direction under one setting."""

    def __init__(
        self,
        setting: str,
        groups: Sequence[DtypeGroup],
        vector_bytes: int,
        allocate: Callable[[int], bytearray | memoryview] = bytearray,
    ) -> None:
        self._groups = groups
        self._allocate = allocate
        self._vector_bytes = vector_bytes
        if setting in (AUTO, AUTO_LOSSY):
            specs = LOSSLESS + (LOSSY if setting == AUTO_LOSSY else ())
        else:
            specs = (NONE, parse(setting).spec)
        self._limits = {spec: parse(spec).encoded_bytes_max(vector_bytes, groups) for spec in specs}
        # No vector takes more than this, however it is encoded.
        self.body_bytes_max = max(self._limits.values())

    def check(self, spec: str, body_bytes: int) -> None:
        """Refuse a spec that was not agreed on, or a length that it cannot have."""
        limit = self._limits.get(spec)
        if limit is None:
            raise RemoteProtocolError(f"a vector encoded as {spec!r}, which is not agreed on", code="W5-122")
        if body_bytes > limit or (spec == NONE and body_bytes != self._vector_bytes):
            raise RemoteProtocolError(
                f"a vector of {body_bytes} bytes encoded as {spec}; at most {limit} are possible",
                code="W5-122",
            )

    def singly(self, spec: str, body_bytes: int) -> list[tuple[int, torch.dtype]] | None:
        """How the numbers of such a body lie, if each stands for itself; None also if it will be refused."""
        if spec not in self._limits or body_bytes != self._limits[spec]:
            return None
        return parse(spec).singly(self._groups)

    def decode(self, spec: str, body: memoryview) -> Tensor:
        """The vector's bytes: a view of the body if it came as it is, else in memory of their own."""
        self.check(spec, len(body))
        if not self._vector_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if spec == NONE:
            return torch.frombuffer(body, dtype=torch.uint8)
        raw = torch.frombuffer(self._allocate(self._vector_bytes), dtype=torch.uint8)
        parse(spec).decode(body, raw, self._groups)
        return raw
