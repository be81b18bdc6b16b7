"""The serialisation of the first system: lists of Python floats in a pickle. For `bench evolution` alone.

The only module that may import pickle, and only the benchmark imports it. It reads only pickles of the
benchmark's own processes, and still accepts only lists and floats: it never looks up a name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NoReturn

import torch
from torch import Tensor, nn

from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs import pipeline
from w5xde.learn.codecs.numbers import Run
from w5xde.learn.model.layout import Blueprint, DtypeGroup, describe

NAME = "pickled"
PROTOCOL = 5


class _ListsOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise RemoteProtocolError(f"a pickle that asks for {module_name}.{global_name}", code="W5-122")


@lru_cache(maxsize=64)
def _packed_bytes(counts: tuple[int, ...]) -> int:
    """Every float takes nine bytes, so the length follows from the counts."""
    return len(pickle.dumps([[0.5] * count for count in counts], protocol=PROTOCOL))


class Pickled:
    """A stage that turns each group of a vector into a list of floats, and all of them into one pickle."""

    def runs(self, groups: Sequence[DtypeGroup]) -> list[Run]:
        return [Run(0, _packed_bytes(tuple(group.count for group in groups)), 1)]

    def pack(self, raw: Tensor, groups: Sequence[DtypeGroup]) -> Tensor:
        lists = [group.values_in(raw).double().tolist() for group in groups]
        return torch.frombuffer(bytearray(pickle.dumps(lists, protocol=PROTOCOL)), dtype=torch.uint8)

    def unpack(self, packed: Tensor, raw: Tensor, groups: Sequence[DtypeGroup]) -> None:
        lists = _ListsOnly(io.BytesIO(packed.numpy().tobytes())).load()
        for group, values in zip(groups, lists, strict=True):
            group.values_in(raw).copy_(torch.tensor(values, dtype=torch.float64))


def growth(model: nn.Module) -> float:
    """The length of the pickle of a model relative to the bytes of its numbers."""
    blueprint = Blueprint(describe(model, set()))
    return Pickled().runs(blueprint.moving_groups)[-1].end / blueprint.moving_bytes


@cache
def register() -> None:
    """Let specs name this stage, here and in processes forked from here."""
    pipeline.register(NAME, Pickled())
