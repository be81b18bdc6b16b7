"""Robust sums: one voice for each node, the extremes left out, the scale of the sum they stand for."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.learn import jobs
from tests.learn.jobs import make, settings
from tests.learn.summing import Complete, Lent, planned
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.model.layout import Vector
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.robust_mean import CHUNK_COUNT, RobustSums, Share, sorting_network
from w5xde.learn.step.sums import Contribution, StepNotFinite
from w5xde.specs.robust_rule import Robust, parse_robust
from w5xde.tree import Span

MEDIAN = Robust(None)


class Every(nn.Module):
    """Trained: two kinds of numbers. Moving: a float, a counter, a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(jobs.FEATURES, jobs.CLASSES)
        self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))

    def forward(self, numbers: Tensor) -> Tensor:
        mean, seen, flags = (self.get_buffer(name) for name in ("mean", "seen", "flags"))
        mean += 1
        seen += 1
        flags |= True
        found: Tensor = self.inner(numbers) + self.wave.abs().sum()
        return found


def every(**changes: Any) -> Learner:
    return prepare(make(Every), settings(**changes)).learner


def update(learner: Learner, chance: random.Random, absent: frozenset[int] = frozenset()) -> Contribution:
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    vector = learner.flat.blueprint.new_vector()
    for part in vector.parts:
        drawn = torch.randn(part.shape, generator=generator) * 100
        part.copy_(drawn > 0 if part.dtype is torch.bool else drawn)
    return Contribution(vector, absent, chance.uniform(0, 3))


def copied(learner: Learner, given: Contribution) -> Contribution:
    return given._replace(vector=Vector.over(given.vector.raw.clone(), learner.flat.blueprint))


def total_of(
    learner: Learner, rule: Robust, sizes: list[int], shares: list[Share], given: dict[int, Contribution]
) -> Contribution:
    sums = RobustSums(learner.flat.blueprint, learner.gauge, rule)
    step = planned(7, sizes)
    for lease, contribution in given.items():
        sums.add(Lent(lease, step, Span(0, 1)), copied(learner, contribution), 0)
    total = sums.total(Complete(step, shares))
    assert total.batches == len(sizes)
    return total.contribution


def reference(
    rule: Robust, sizes: list[int], shares: list[Share], given: dict[int, Contribution]
) -> list[np.ndarray[Any, Any]]:
    """The definition, in doubles, one coordinate at a time."""
    nodes = sorted({share[2] for share in shares})
    out = rule.left_out(len(nodes))
    samples = sum(sum(sizes[start:stop]) for start, stop, _, _ in shares)
    batches = sum(stop - start for start, stop, _, _ in shares)
    found = []
    for place, part in enumerate(next(iter(given.values())).vector.parts):
        rows = []
        for node in nodes:
            mine = [share for share in shares if share[2] == node]
            count = sum(sum(sizes[share[0] : share[1]]) for share in mine)
            if place >= 2:  # a buffer
                count = sum(share[1] - share[0] for share in mine)
            numbers = sum(given[lease].vector.parts[place].numpy().astype(complex) for *_, lease in mine)
            rows.append(numbers / count * (batches if place >= 2 else samples))
        if part.dtype is torch.bool:
            found.append(np.sum([row != 0 for row in rows], axis=0) > out)
            continue
        kept = [
            np.sort(np.array([take(row) for row in rows]), axis=0)[out : len(nodes) - out].mean(axis=0)
            for take in (np.real, np.imag)
        ]
        found.append(kept[0] + 1j * kept[1])
    return found


def assert_close(vector: Vector, wanted: list[np.ndarray[Any, Any]]) -> None:
    for part, numbers in zip(vector.parts, wanted, strict=True):
        if part.dtype is torch.bool:
            assert (part.numpy() == numbers).all()
        elif part.dtype is torch.int64:
            assert (np.abs(part.numpy() - numbers) <= 0.5 + 1e-9).all()
        else:
            np.testing.assert_allclose(part.numpy(), numbers, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rule", [Robust(1), Robust(2), MEDIAN], ids=["trim:1", "trim:2", "median"])
def test_it_is_what_it_is_defined_to_be_for_every_kind_of_number(rule: Robust, nodes: int) -> None:
    learner, chance = every(), random.Random(nodes)
    sizes = [chance.randint(1, 9) for _ in range(12)]
    # The sixth batch was set aside; each node has one of the others, and the rest is random.
    places = [place for place in range(12) if place != 5]
    owners = [*range(nodes), *(chance.randrange(nodes) for _ in places)]
    shares = [(p, p + 1, f"n{owner}", 100 + p) for p, owner in zip(places, owners, strict=False)]
    given = {share[3]: update(learner, chance) for share in shares}
    total = total_of(learner, rule, sizes, shares, given)
    assert_close(total.vector, reference(rule, sizes, shares, given))
    assert total.loss_sum == pytest.approx(sum(each.loss_sum for each in given.values()))


def test_of_nodes_that_agree_nothing_is_lost() -> None:
    """The scale is that of the sum: an optimizer sees no difference, nor do running statistics."""
    learner = every()
    one = update(learner, random.Random(1))
    for part in one.vector.parts:
        part.copy_(torch.ones_like(part))
    sizes, shares = [4] * 6, [(i, i + 1, f"n{i}", i) for i in range(6)]
    total = total_of(learner, Robust(2), sizes, shares, dict.fromkeys(range(6), one))
    for part in total.vector.parts:
        assert (part == (1 if part.dtype is torch.bool else 6)).all()


def test_liars_are_bounded_by_what_honest_nodes_found() -> None:
    learner, chance = every(), random.Random(2)
    sizes, shares = [4] * 7, [(i, i + 1, f"n{i}", i) for i in range(7)]
    given = {i: update(learner, chance) for i in range(7)}
    honest = [given[i].vector.parts[1].clone() * 7 for i in range(5)]
    for lie in (1e30, -1e30):
        for liar in (5, 6):
            given[liar].vector.parts[1].fill_(lie)
        found = total_of(learner, Robust(2), sizes, shares, given).vector.parts[1]
        assert (found >= torch.stack(honest).amin(0)).all()
        assert (found <= torch.stack(honest).amax(0)).all()


def test_who_computed_more_has_no_larger_voice() -> None:
    learner = every()
    given = {i: update(learner, random.Random(i)) for i in range(3)}
    for i, value in enumerate((1.0, 2.0, 30.0)):
        given[i].vector.parts[0].fill_(value * (6 if i == 2 else 1))
    # The last one has six batches of eight.
    shares = [(0, 1, "a", 0), (1, 2, "b", 1), (2, 8, "c", 2)]
    found = total_of(learner, MEDIAN, [1] * 8, shares, given).vector.parts[0]
    assert (found == 16.0).all()


def test_the_bits_depend_on_who_computed_what_and_on_nothing_else() -> None:
    learner, chance = every(), random.Random(3)
    shares = [(i, i + 1, f"n{i % 5}", i) for i in range(10)]
    given = {i: update(learner, chance) for i in range(10)}
    first = total_of(learner, Robust(1), [3] * 10, shares, given).vector
    order = list(given)
    for _ in range(5):
        chance.shuffle(order)
        chance.shuffle(shares)
        again = total_of(learner, Robust(1), [3] * 10, shares, {i: given[i] for i in order}).vector
        assert again.is_same(first)
    renamed = [(start, stop, f"x{node}"[::-1], lease) for start, stop, node, lease in shares]
    assert total_of(learner, Robust(1), [3] * 10, renamed, given).vector.is_same(first)


def test_a_copy_that_came_too_late_counts_nothing() -> None:
    learner, chance = every(), random.Random(4)
    shares = [(i, i + 1, f"n{i}", i) for i in range(3)]
    given = {i: update(learner, chance) for i in range(4)}
    with_it = total_of(learner, MEDIAN, [1] * 3, shares, given).vector
    del given[3]
    assert total_of(learner, MEDIAN, [1] * 3, shares, given).vector.is_same(with_it)


@pytest.mark.parametrize(("said_by", "is_absent"), [(5, True), (4, True), (3, True), (2, False), (0, False)])
def test_an_entry_is_without_a_gradient_unless_more_have_one_than_are_left_out(
    said_by: int, is_absent: bool
) -> None:
    """Two liars of five that claim a gradient would make weight decay act on the parameter."""
    learner, chance = every(), random.Random(5)
    given = {i: update(learner, chance, frozenset({0} if i < said_by else ())) for i in range(5)}
    shares = [(i, i + 1, f"n{i}", i) for i in range(5)]
    assert total_of(learner, Robust(2), [1] * 5, shares, given).absent == ({0} if is_absent else set())


def test_a_sum_that_is_not_finite_is_spoiled() -> None:
    learner = every()
    given = {i: update(learner, random.Random(i)) for i in range(3)}
    for each in given.values():
        each.vector.parts[0].fill_(3e38)
    with pytest.raises(StepNotFinite, match="step 8 is not finite"):
        total_of(learner, MEDIAN, [1] * 3, [(i, i + 1, f"n{i}", i) for i in range(3)], given)


def test_what_is_dropped_is_gone() -> None:
    learner = every()
    sums = RobustSums(learner.flat.blueprint, learner.gauge, MEDIAN)
    step = planned(0, [1])
    sums.add(Lent(1, step, Span(0, 1)), update(learner, random.Random(0)), 0)
    sums.drop(0)
    sums.drop(0)
    with pytest.raises(KeyError):
        sums.total(Complete(step, [(0, 1, "a", 1)]))


def test_a_counter_stays_within_its_kind() -> None:
    learner = every()
    given = {i: update(learner, random.Random(i)) for i in range(3)}
    for each in given.values():
        each.vector.parts[3].fill_(2**62)
    found = total_of(learner, MEDIAN, [1] * 3, [(i, i + 1, f"n{i}", i) for i in range(3)], given)
    assert (found.vector.parts[3] == 2**53).all()


def test_a_large_vector_is_done_in_pieces() -> None:
    learner = prepare(make(lambda: nn.Linear(jobs.FEATURES, CHUNK_COUNT // 2)), settings()).learner
    given = {i: update(learner, random.Random(i)) for i in range(3)}
    rows = [each.vector.parts[0] for each in given.values()]
    found = total_of(learner, MEDIAN, [1] * 3, [(i, i + 1, f"n{i}", i) for i in range(3)], given)
    assert rows[0].numel() > 3 * CHUNK_COUNT
    assert torch.equal(found.vector.parts[0], torch.stack(rows).mul(3).median(0).values)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 9, 10, 13, 16])
def test_the_network_sorts(count: int) -> None:
    """What sorts all zeros and ones sorts everything."""
    numbers = random.Random(count)
    cases = range(2**count) if count <= 10 else [numbers.getrandbits(count) for _ in range(2000)]
    for case in cases:
        row = [case >> i & 1 for i in range(count)]
        for low, high in sorting_network(count):
            row[low], row[high] = min(row[low], row[high]), max(row[low], row[high])
        assert row == sorted(row)


@pytest.mark.parametrize(
    ("text", "needs", "out_of_eight"),
    [("trim:1", 3, 1), ("trim:3", 7, 3), ("trim:9", 19, 3), ("median", 3, 3)],
)
def test_how_many_nodes_it_takes_and_how_many_are_left_out(text: str, needs: int, out_of_eight: int) -> None:
    rule = parse_robust(text)
    assert rule is not None
    assert rule.needs == needs
    assert rule.left_out(8) == out_of_eight
    assert [rule.left_out(nodes) for nodes in (1, 2, 3)] == [0, 0, 1]
    assert parse_robust("off") is None
