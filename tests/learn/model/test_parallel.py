"""Work on all cores: shares cover a vector, and give what one core gives."""

from __future__ import annotations

import math

import pytest
import torch

from w5xde.learn.model import parallel
from w5xde.learn.model.layout import Blueprint
from w5xde.learn.model.parallel import add_to, on_all_cores, shares
from w5xde.learn.step.finite import Gauge
from w5xde.messages import TRAINED, Entry, Layout


@pytest.fixture
def short_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SHARE_NUMBERS", 20_000)


@pytest.mark.parametrize("count", [0, 1, 19_999, 20_000, 20_001, 65_000])
def test_shares_follow_each_other_and_leave_nothing_out(count: int, short_shares: None) -> None:
    numbers = torch.arange(count)
    assert torch.equal(torch.cat([numbers[cut] for cut in shares(count)]), numbers)


def test_an_error_in_one_share_is_raised_after_all_have_ended() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 1:
            raise ValueError("one of them")
        done.append(number)

    with pytest.raises(ValueError, match="one of them"):
        on_all_cores(work, 5)
    assert sorted(done) == [0, 2, 3, 4]


def test_a_sum_of_shares_has_the_bits_of_one_sum(short_shares: None) -> None:
    first, second = torch.randn(65_001), torch.randn(65_001)
    expected = first + second
    add_to(first, second)
    assert torch.equal(first, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_found_in_any_share(value: float, short_shares: None) -> None:
    layout = Layout([Entry("weight", "float32", (65_001,), TRAINED)])
    blueprint = Blueprint(layout)
    vector = blueprint.new_vector()
    vector.parts[0].fill_(0.5)
    gauge = Gauge(blueprint)
    assert gauge.norm(vector) == pytest.approx(0.5 * math.sqrt(65_001))
    for place in (0, 30_000, 65_000):
        vector.parts[0][place] = value
        assert gauge.norm(vector) == math.inf
        vector.parts[0][place] = 0.5
