"""Pieces of a safetensors file: the same bytes as the library's, from the tensors' own memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from w5xde.learn.model.layout import DTYPES
from w5xde.learn.model.tensor_file import PIECE_BYTES, safetensors_pieces


def of_dtype(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor of this dtype that the library can save; None if there is none."""
    try:
        tensor = torch.zeros((*shape, DTYPES[name].itemsize), dtype=torch.uint8).view(DTYPES[name])[..., 0]
        save({"": tensor.contiguous()})
    except (KeyError, RuntimeError, TypeError):
        return None
    return tensor


EVERY = {name: tensor for name in DTYPES if (tensor := of_dtype(name, (3, 2))) is not None}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: name != "__metadata__"
)
TENSORS = st.sampled_from(
    [*EVERY.values(), torch.tensor(1.5), torch.empty(0, 3), torch.ones(2, 3).t(), torch.arange(9)[::2]]
)


@settings(deadline=None)
@given(st.dictionaries(NAMES, TENSORS, max_size=8))
def test_the_pieces_are_the_bytes_of_the_library(tensors: dict[str, torch.Tensor]) -> None:
    expected = save(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )
    assert b"".join(safetensors_pieces(tensors)) == expected


def test_every_dtype_that_the_library_knows_is_written_in_its_order() -> None:
    assert {"float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn"} <= EVERY.keys()
    assert b"".join(safetensors_pieces(EVERY)) == save({name: each.clone() for name, each in EVERY.items()})


def test_a_dtype_that_the_library_does_not_know_is_refused() -> None:
    with pytest.raises(KeyError):
        list(safetensors_pieces({"a": torch.zeros(1, dtype=torch.complex128)}))


def test_large_tensors_are_cut_and_not_copied() -> None:
    tensor = torch.arange(PIECE_BYTES, dtype=torch.float32)
    _, *pieces = safetensors_pieces({"a": tensor})
    assert [len(piece) for piece in pieces] == [PIECE_BYTES] * 4
    assert all(np.shares_memory(np.frombuffer(piece, np.uint8), tensor.numpy()) for piece in pieces)
