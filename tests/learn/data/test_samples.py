"""Samples as bytes: a batch that is taken apart and put together again has the bytes it had."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w5xde.learn.data.packed_epochs import PackedEpochs
from w5xde.learn.data.payload import pack_batch, unpack
from w5xde.learn.data.recipe import Recipe, collate
from w5xde.learn.data.samples import (
    SampleFormat,
    SampleSet,
    bits_of,
    check_of,
    chosen_of,
    hashes_of,
    list_samples,
    listed_numbers,
)
from w5xde.learn.data.sources import open_source
from w5xde.message_types import Item, ListOf, TensorAt

SAMPLES: dict[str, Any] = {
    "pair": lambda i: (torch.full((3, 2), float(i)), i),
    "dict": lambda i: {"x": torch.tensor([i, i + 1], dtype=torch.uint8), "deep": [(float(i), i % 2 == 0)]},
    "numpy": lambda i: (np.full(5, i, np.float64), np.int32(i)),
    "empty part": lambda i: (torch.empty(0, 3), torch.tensor(i, dtype=torch.bfloat16)),
    "complex": lambda i: torch.tensor([complex(i, -i)]),
}


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("name", SAMPLES)
def test_a_batch_is_put_together_from_its_samples_bit_for_bit(name: str, count: int) -> None:
    packed = pack_batch(count, collate([SAMPLES[name](i) for i in range(count)]))
    form = SampleFormat.of(packed.item, count)
    assert form is not None
    rows = form.split(packed)
    assert rows is not None
    assert rows.shape == (count, form.sample_bytes)
    # Each sample alone has the same bytes as in the batch.
    for i in range(count):
        alone = form.split(pack_batch(1, collate([SAMPLES[name](i)])))
        assert alone is not None
        assert (alone[0] == rows[i]).all()
    body = form.join(rows)
    assert body == b"".join(packed.pieces)
    assert len(body) == packed.body_bytes == form.body_bytes(count)
    assert msgspec.msgpack.encode(form.item(count)) == msgspec.msgpack.encode(packed.item)


@pytest.mark.parametrize("sampler", [None, [9, 9, 1, 0, 2, 2, 2, 5, 3, 8]])
def test_samples_of_packed_epochs_are_the_same(sampler: list[int] | None) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.arange(10, dtype=torch.uint8))
    source = open_source(data, batch_size=4, seed=0, shuffle=True, recipe=Recipe(sampler=sampler))
    packed = PackedEpochs.of(source)
    assert packed is not None
    plain = pack_batch(2, source.read(1, 2))
    form = SampleFormat.of(plain.item, 2)
    assert form is not None
    rows = form.split(packed.batch(1, 2))
    assert rows is not None
    assert (rows == form.split(plain)).all()


def test_only_what_a_slice_of_memory_can_give_is_packed_by_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(10, 4))
    how: dict[str, Any] = {"batch_size": 4, "seed": 0, "shuffle": True}
    assert PackedEpochs.of(open_source(data, **how)) is not None
    for recipe in (Recipe(collate=list), Recipe(sampler=lambda dataset, epoch, seed: [1])):
        assert PackedEpochs.of(open_source(data, **how, recipe=recipe)) is None
    # Drawn a thousand times, it is no small data set any more.
    monkeypatch.setattr("w5xde.learn.data.packed_epochs.DATA_BYTES_MAX", 1000)
    assert PackedEpochs.of(open_source(data, **how)) is not None
    assert PackedEpochs.of(open_source(data, **how, recipe=Recipe(sampler=[1] * 100))) is None


def test_what_has_no_row_for_each_sample_has_no_format() -> None:
    def form(value: Any, count: int = 2) -> SampleFormat | None:
        return SampleFormat.of(pack_batch(count, value).item, count)

    assert form([torch.zeros(2), torch.zeros(2, 3)]) is not None
    for value in (
        torch.zeros(3),
        torch.tensor(1.0),
        [torch.zeros(2), ["a", "b"]],
        [torch.zeros(2), None],
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, 0),
        [],
    ):
        assert form(value) is None
    assert SampleFormat.of(TensorAt("float32", (2,), 16), 2) is None
    assert SampleFormat.of(TensorAt("float33", (2,), 0), 2) is None
    assert SampleFormat.of(TensorAt("float32", (0, 5), 0), 0) is None
    deep: Item = TensorAt("float32", (2,), 0)
    for _ in range(200):
        deep = ListOf([deep])
    assert SampleFormat.of(deep, 2) is None


def test_a_batch_of_another_shape_is_not_taken_apart() -> None:
    form = SampleFormat.of(pack_batch(2, torch.zeros(2, 3)).item, 2)
    assert form is not None
    for other in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64), [torch.zeros(2, 3)]):
        assert form.split(pack_batch(2, other)) is None


def test_every_bit_and_the_number_of_a_sample_change_its_hash() -> None:
    numbers, rows = np.array([4, 5], np.uint32), np.zeros((2, 33), np.uint8)
    hashes = hashes_of(numbers, rows)
    assert (hashes[0] != hashes[1]).any()
    rows[1, 32] ^= 1
    changed = hashes_of(numbers, rows)
    assert (changed[0] == hashes[0]).all()
    assert (changed[1] != hashes[1]).any()
    assert check_of(changed) != check_of(hashes)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.booleans())
def test_choices_travel_as_bits(chosen: list[bool], beyond: bool) -> None:
    bits = bits_of(np.array(chosen)).tobytes()
    assert chosen_of(bits, len(chosen), beyond=beyond).tolist() == chosen
    assert chosen_of(b"", len(chosen), beyond=beyond).tolist() == [beyond] * len(chosen)
    assert chosen_of(bits + b"\xff" * 9, len(chosen)).tolist() == chosen


def test_a_list_names_its_samples_in_four_bytes_each() -> None:
    numbers = np.array([7, 2**32 - 1], np.uint32)
    listed = list_samples(numbers, np.array([False, True]), hashes_of(numbers, np.zeros((2, 1), np.uint8)))
    assert (listed.numbers, listed.sent) == (b"\x07\0\0\0\xff\xff\xff\xff", b"\x02")
    assert listed_numbers(listed).tolist() == [7, 2**32 - 1]


@settings(max_examples=200)
@given(
    st.integers(0, 70),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 80), max_size=9))),
)
def test_a_set_of_samples_is_a_set_of_those_for_which_there_is_room(
    size: int, changes: list[tuple[bool, list[int]]]
) -> None:
    ours, model = SampleSet(size), set[int]()
    for adds, numbers in changes:
        (ours.add if adds else ours.discard)(np.array(numbers, np.uint32))
        fitting = {number for number in numbers if number < size}
        model = model | fitting if adds else model - fitting
    asked = np.array([*range(90), 2**32 - 1], np.uint32)
    assert asked[ours.has(asked)].tolist() == sorted(model)
    assert len(ours) == len(model)


def test_a_sets_bits_may_be_too_many_or_too_few() -> None:
    assert len(SampleSet(9, b"\xff\xff\xff")) == 9
    assert len(SampleSet(90, b"\xff")) == 8
    both = SampleSet(9, b"\x01")
    both.update(SampleSet(9, b"\x00\x01"))
    assert len(both) == 2


def test_the_value_survives_too() -> None:
    packed = pack_batch(3, collate([SAMPLES["dict"](i) for i in range(3)]))
    form = SampleFormat.of(packed.item, 3)
    assert form is not None
    rows = form.split(packed)
    assert rows is not None
    value = unpack(form.item(3), form.join(rows))
    assert value["x"].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert value["deep"][0][1].tolist() == [True, False, True]
