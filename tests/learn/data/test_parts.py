"""Parts of a batch: which rows each has follows from numbers alone; what cannot be split is refused."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from w5xde.errors import UsageError
from w5xde.learn.data.parts import Part, PartSource, make_parts
from w5xde.learn.job.pool_job import PARTS_MAX

Pair = namedtuple("Pair", "x y")


def refused(batch: Any, parts: Any = None, samples: Any = None) -> str:
    with pytest.raises(UsageError) as caught:
        make_parts(batch, parts, samples)
    assert caught.value.code == "W5-271"
    return f"{caught.value.what}; {caught.value.fix}"


@pytest.mark.parametrize(("rows", "parts"), [(8, 4), (10, 4), (3, 5), (1, 1), (7, 7)])
def test_parts_differ_by_one_row_at_most_and_give_the_batch_again(rows: int, parts: int) -> None:
    batch = torch.arange(rows)
    found = make_parts(batch, parts, None)
    assert [part.samples for part in found] == [len(each) for each in batch.tensor_split(min(rows, parts))]
    assert torch.equal(torch.cat([part.value for part in found]), batch)


def test_every_tensor_is_split_and_all_else_goes_with_every_part() -> None:
    rows = torch.arange(4)
    batch = {
        "pair": (rows, [rows + 1, "all"]),
        "named": Pair(rows.float(), np.arange(4.0)),
        "names": ["a", "b", "c", "d"],
        "scale": torch.tensor(2.0),
        "beta": 0.5,
        "words": ["x", "y"],
        "none": None,
    }
    first, second = make_parts(batch, 2, None)
    assert (first.samples, second.samples) == (2, 2)
    assert list(second.value) == list(batch)
    assert second.value["pair"][0].tolist() == [2, 3]
    assert second.value["pair"][1][0].tolist() == [3, 4]
    assert second.value["pair"][1][1] == "all"
    assert isinstance(second.value["named"], Pair)
    assert second.value["named"].y.tolist() == [2.0, 3.0]
    assert first.value["names"] == ["a", "b"]
    assert first.value["scale"] is batch["scale"]
    assert (first.value["beta"], first.value["words"], first.value["none"]) == (0.5, ["x", "y"], None)


def test_parts_that_are_given_count_for_their_rows_or_as_is_said() -> None:
    parts = [(torch.ones(3, 2), torch.ones(3)), (torch.ones(1, 2), torch.ones(1))]
    assert [part.samples for part in make_parts(parts, None, None)] == [3, 1]
    assert [part.samples for part in make_parts(parts, None, [30, 10])] == [30, 10]
    assert make_parts([{"seed": 1}, {"seed": 2}], None, None) == [Part(1, {"seed": 1}), Part(1, {"seed": 2})]
    # A graph: nodes and edges have rows of their own.
    graph = {"nodes": torch.ones(5, 2), "edges": torch.ones(2, 9)}
    assert make_parts([graph], None, [5]) == [Part(5, graph)]


@pytest.mark.parametrize(
    ("batch", "parts", "samples", "said"),
    [
        (
            torch.ones(4),
            None,
            None,
            "the batch is a Tensor, and parts= is not given; say into how many parts",
        ),
        ((torch.ones(4), torch.ones(4)), None, None, "the batch is a tuple"),
        ([], None, None, "the batch is an empty list"),
        ([torch.ones(4, 3), torch.ones(4).long()], None, None, "are not alike, so they are not parts"),
        ([torch.ones(4), torch.ones(4)], None, [1], "samples=[1] for 2 parts"),
        ([torch.ones(4)], None, [0], "give a whole number above 0"),
        ([torch.ones(4)], None, [1.5], "give a whole number above 0"),
        ([{"x": torch.ones(4), "y": torch.ones(3)}], None, None, "part 0['x'] has 4 rows"),
        (torch.ones(4), 0, None, "parts=0"),
        (torch.ones(4), "two", None, "parts='two'"),
        (torch.ones(4), 2, [2, 2], "samples= is for parts that are given one by one"),
        (
            {"x": torch.ones(4), "y": torch.ones(5, 2)},
            2,
            None,
            "the batch['y'] has 5 rows, and the batch['x']",
        ),
        ({"seed": 3}, 2, None, "no tensor with rows"),
        (torch.ones(0, 3), 2, None, "no tensor with rows"),
        (torch.ones(PARTS_MAX + 1), PARTS_MAX + 1, None, "give at most 65536"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_way_out(
    batch: Any, parts: Any, samples: Any, said: str
) -> None:
    assert said in refused(batch, parts, samples)


def test_a_canary_has_the_first_rows_or_a_whole_part_that_cannot_be_divided() -> None:
    assert PartSource(Part(9, [torch.arange(9)])).first(4)[0].tolist() == [0, 1, 2, 3]
    assert PartSource(Part(1, {"seed": 1})).first(4) == {"seed": 1}
    graph = {"nodes": torch.ones(5, 2), "edges": torch.ones(2, 9)}
    assert PartSource(Part(5, graph)).first(4) is graph
