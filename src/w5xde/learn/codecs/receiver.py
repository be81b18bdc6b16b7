"""The receiver: decodes vectors of a peer, after it has checked spec and length against what the run allows.

Knows no sockets: it gets whole bodies.
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
    """Decodes vectors of one layout, of one direction, under one setting of `compress`."""

    def __init__(
        self,
        setting: str,
        groups: Sequence[DtypeGroup],
        vector_bytes: int,
        allocate: Callable[[int], bytearray | memoryview] = bytearray,
        *,
        allows_raw: bool = True,
    ) -> None:
        """`allows_raw`: a vector may also come as it is, whatever the setting."""
        self._groups = groups
        self._allocate = allocate
        self._vector_bytes = vector_bytes
        if setting in (AUTO, AUTO_LOSSY):
            specs = LOSSLESS + (LOSSY if setting == AUTO_LOSSY else ())
        else:
            specs = (NONE, parse(setting).spec) if allows_raw else (parse(setting).spec,)
        self._limits = {spec: parse(spec).encoded_bytes_max(vector_bytes, groups) for spec in specs}
        # No encoded vector is longer.
        self.body_bytes_max = max(self._limits.values())

    def check(self, spec: str, body_bytes: int) -> None:
        """Refuse a spec that the run does not allow, or a length that is impossible for it."""
        limit = self._limits.get(spec)
        if limit is None:
            raise RemoteProtocolError(f"a vector encoded as {spec!r}, which is not agreed on", code="W5-122")
        if body_bytes > limit or (spec == NONE and body_bytes != self._vector_bytes):
            raise RemoteProtocolError(
                f"a vector of {body_bytes} bytes encoded as {spec}; at most {limit} are possible",
                code="W5-122",
            )

    def element_layout(self, spec: str, body_bytes: int) -> list[tuple[int, torch.dtype]] | None:
        """As in `CodecPipeline`, for a body that is still arriving; None also if `check` would refuse it."""
        if spec not in self._limits or body_bytes != self._limits[spec]:
            return None
        return parse(spec).element_layout(self._groups)

    def decode(self, spec: str, body: memoryview) -> Tensor:
        """The bytes of the vector: a view of a body that was not encoded, else memory of their own."""
        self.check(spec, len(body))
        if not self._vector_bytes:
            return torch.empty(0, dtype=torch.uint8)
        if spec == NONE:
            return torch.frombuffer(body, dtype=torch.uint8)
        raw = torch.frombuffer(self._allocate(self._vector_bytes), dtype=torch.uint8)
        parse(spec).decode(body, raw, self._groups)
        return raw
