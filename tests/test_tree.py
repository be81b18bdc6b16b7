"""The canonical tree: any division of a step, in any order of arrival, gives the same expression."""

from __future__ import annotations

import random

import pytest

from w5xde.tree import PairwiseTree, Span, batch_seed, halves, is_aligned, sibling

COUNTS = [*range(1, 20), 31, 32, 33, 63, 64]


def expression(span: Span) -> str:
    """How a span must be summed, written out."""
    if span.count == 1:
        return str(span.start)
    left, right = halves(span)
    return f"({expression(left)}+{expression(right)})"


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def every_span(count: int) -> list[Span]:
    """Every node of the tree over `count` batches, found by walking down from the root."""
    found = [Span(0, count)]
    for span in found:
        if span.count > 1:
            found += halves(span)
    return found


def some_cover(rng: random.Random, span: Span) -> list[Span]:
    """Aligned spans that together are `span`, cut at random."""
    if span.count == 1 or rng.random() < 0.3:
        return [span]
    return [part for half in halves(span) for part in some_cover(rng, half)]


def test_a_span_splits_at_the_largest_power_of_two_below_its_length() -> None:
    assert halves(Span(0, 2)) == (Span(0, 1), Span(1, 2))
    assert halves(Span(0, 8)) == (Span(0, 4), Span(4, 8))
    assert halves(Span(0, 7)) == (Span(0, 4), Span(4, 7))
    assert halves(Span(4, 7)) == (Span(4, 6), Span(6, 7))
    assert expression(Span(0, 6)) == "(((0+1)+(2+3))+(4+5))"


@pytest.mark.parametrize("count", COUNTS)
def test_any_cover_in_any_order_gives_the_same_expression(count: int) -> None:
    rng = random.Random(count)
    for _ in range(20):
        cover = some_cover(rng, Span(0, count))
        rng.shuffle(cover)
        tree = PairwiseTree(count, join)
        for span in cover:
            assert not tree.is_complete
            assert tree.put(span, expression(span)) == []
        assert tree.is_complete
        assert tree.take(Span(0, count)) == expression(Span(0, count))
        assert list(tree) == []


@pytest.mark.parametrize("count", COUNTS)
def test_answers_that_overlap_change_nothing(count: int) -> None:
    """Copies of late spans have any size: covered ones are ignored, larger ones replace smaller ones."""
    rng = random.Random(1000 + count)
    spans = every_span(count)
    for _ in range(20):
        tree = PairwiseTree(count, join)
        while not tree.is_complete:
            span = rng.choice(spans)
            if not tree.covers(span):
                tree.put(span, expression(span))
        assert tree.take(Span(0, count)) == expression(Span(0, count))


@pytest.mark.parametrize("count", COUNTS)
def test_aligned_spans_are_exactly_the_nodes_of_the_tree(count: int) -> None:
    tree = set(every_span(count))
    for start in range(-1, count + 1):
        for stop in range(start, count + 2):
            assert is_aligned(Span(start, stop), count) == (Span(start, stop) in tree)


@pytest.mark.parametrize("count", COUNTS)
def test_a_sibling_is_the_parents_other_child(count: int) -> None:
    assert sibling(Span(0, count), count) is None
    for parent in every_span(count):
        if parent.count > 1:
            left, right = halves(parent)
            assert sibling(left, count) == (parent, right)
            assert sibling(right, count) == (parent, left)


def test_a_batch_at_the_end_stands_for_several_levels_at_once() -> None:
    assert sibling(Span(8, 9), 9) == (Span(0, 9), Span(0, 8))
    assert sibling(Span(12, 13), 13) == (Span(8, 13), Span(8, 12))


def test_covered_means_that_every_batch_has_its_place() -> None:
    tree = PairwiseTree(8, join)
    assert not tree.covers(Span(0, 1))
    tree.put(Span(0, 2), "01")
    tree.put(Span(3, 4), "3")
    assert tree.covers(Span(0, 2))
    assert tree.covers(Span(1, 2))
    assert tree.covers(Span(3, 4))
    assert not tree.covers(Span(2, 3))
    assert not tree.covers(Span(2, 4))
    assert not tree.covers(Span(0, 4))
    tree.put(Span(2, 3), "2")
    assert tree.covers(Span(0, 4))
    assert not tree.covers(Span(0, 8))


def test_a_larger_answer_supersedes_the_smaller_ones_within_it() -> None:
    tree = PairwiseTree(8, join)
    tree.put(Span(0, 1), "0")
    tree.put(Span(2, 4), "23")
    tree.put(Span(4, 5), "4")
    assert sorted(tree.put(Span(0, 4), "0123")) == ["0", "23"]
    assert list(tree) == [(Span(0, 4), "0123"), (Span(4, 5), "4")]


def test_neighbours_merge_as_soon_as_both_are_there() -> None:
    tree = PairwiseTree(4, join)
    tree.put(Span(3, 4), "3")
    tree.put(Span(0, 2), "(0+1)")
    assert list(tree) == [(Span(0, 2), "(0+1)"), (Span(3, 4), "3")]
    tree.put(Span(2, 3), "2")
    assert list(tree) == [(Span(0, 4), "((0+1)+(2+3))")]


def test_batches_next_to_each_other_without_a_common_parent_stay_apart() -> None:
    tree = PairwiseTree(4, join)
    tree.put(Span(1, 2), "1")
    tree.put(Span(2, 3), "2")
    assert list(tree) == [(Span(1, 2), "1"), (Span(2, 3), "2")]


def test_the_seed_of_a_batch_never_changes() -> None:
    """Pinned: another value would make every run of an older version unrepeatable."""
    assert batch_seed(0, 0, 0) == 1445694884619442965
    assert batch_seed(42, 3, 17) == 3350716126056206493


def test_every_batch_has_a_seed_of_its_own_in_63_bits() -> None:
    seeds = [batch_seed(run, epoch, batch) for run in range(4) for epoch in range(8) for batch in range(32)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_aligned_spans_that_meet_hold_one_another():
    aligned = [Span(i, j) for i in range(11) for j in range(i + 1, 12) if is_aligned(Span(i, j), 11)]
    assert len(aligned) == 2 * 11 - 1
    for one in aligned:
        for other in aligned:
            assert one.meets(other) == (one.holds(other) or other.holds(one))
