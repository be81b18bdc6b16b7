"""Values of any shape go through a checkpoint's files and come back with the same types and bits."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from w5xde.learn.model.tensor_file import safetensors_pieces
from w5xde.learn.step.checkpoint import pack, unpack


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and bits: also for what is no number."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _raw(one) == _raw(other)
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (one != one and other != other)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def travelled(value: Any) -> Any:
    """The value after its journey through both files."""
    tensors: dict[str, torch.Tensor] = {}
    text = msgspec.json.encode(pack(value, "it", tensors))
    return unpack(msgspec.json.decode(text), load(b"".join(safetensors_pieces(tensors))))


TENSORS = st.sampled_from(
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.tensor([[1, 2], [3, 4]]).t(),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), -0.0], dtype=torch.float64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(3, dtype=torch.uint8),
    ]
)
KEYS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | TENSORS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=3) | st.integers(), st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert same(travelled(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**63 - 1,
        2**63,
        -(2**63),
        -(2**200),
        float("inf"),
        float("-inf"),
        float("nan"),
        -0.0,
        5e-324,
        1.7976931348623157e308,
        0.1 + 0.2,
        "",
        "é\x00\u2028",
        (),
        [[]],
        {"tuple": [1]},
        {"tensor": "it"},
        Counter({3: 2, 5: 0, 9: -1}),
        {1: "one", "1": "text", None: 0, 0.5: "half", False: "no"},
    ],
    ids=repr,
)
def test_what_is_easily_lost_comes_back_as_it_was(value: Any) -> None:
    assert same(travelled(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {1: torch.tensor(1), "1": torch.tensor(2)},
        {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2)},
        {"a": [torch.tensor(1)], "a.0": torch.tensor(2)},
        {None: torch.tensor(1), "None": torch.tensor(2)},
    ],
    ids=repr,
)
def test_tensors_in_places_of_like_names_are_not_taken_for_each_other(value: Any) -> None:
    assert same(travelled(value), value)


@pytest.mark.parametrize("key", [2**63, -(2**70), float("inf"), float("nan")])
def test_unusual_keys_come_back_as_they_were(key: Any) -> None:
    assert same(travelled({key: "value"}), {key: "value"})
