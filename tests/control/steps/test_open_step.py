"""A step in progress: every batch is free, in hands, or in; a bad one is found out batch by batch."""

from __future__ import annotations

import itertools

from w5xde.control.pool.members import Members
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span

NUMBERS = itertools.count(1)


def step(count: int) -> OpenStep:
    return OpenStep(StepPlan(index=0, epoch=0, first=0, sizes=(1,) * count, ends_epoch=True))


def pool(*names: str) -> Members:
    members = Members()
    for name in names:
        members.join(name, now=0.0)
    return members


def lent(work: OpenStep, node: str, start: int, stop: int) -> Lease:
    return Lease(
        next(NUMBERS), node, work.plan, Span(start, stop), version=0, granted_at=0.0, expected_at=0.0
    )


def carve(work: OpenStep, node: str, want: int, members: Members) -> Span:
    span = work.carve(node, want, members)
    assert span is not None
    return span


def test_spans_are_carved_along_the_tree_lowest_first() -> None:
    work, members = step(8), pool("a")
    assert carve(work, "a", 2, members) == Span(0, 2)
    assert carve(work, "a", 2, members) == Span(2, 4)
    assert carve(work, "a", 3, members) == Span(4, 6)
    assert work.free_batches == 2
    assert carve(work, "a", 64, members) == Span(6, 8)
    assert work.carve("a", 1, members) is None


def test_a_span_comes_back_whole() -> None:
    work, members = step(4), pool("a")
    assert carve(work, "a", 4, members) == Span(0, 4)
    assert work.give_back(Span(0, 4), []) == 4
    assert work.free == [Span(0, 4)]


def test_what_is_in_does_not_come_back() -> None:
    work, members = step(4), pool("a", "b")
    carve(work, "a", 4, members)
    work.tree.put(Span(0, 2), [(0, 2, "b")])
    assert work.give_back(Span(0, 4), []) == 2
    assert work.free == [Span(2, 4)]


def test_what_is_in_other_hands_does_not_come_back() -> None:
    """Whole or in part: two idle nodes may share a copy of a long lease between them."""
    work, members = step(4), pool("a", "b", "c")
    carve(work, "a", 4, members)
    assert work.give_back(Span(0, 4), [lent(work, "b", 0, 4)]) == 0
    assert work.give_back(Span(0, 4), [lent(work, "b", 0, 2), lent(work, "c", 2, 4)]) == 0
    assert work.free == []
    assert work.give_back(Span(0, 4), [lent(work, "b", 0, 2)]) == 2
    assert work.free == [Span(2, 4)]


def test_what_is_free_already_is_not_freed_twice() -> None:
    work, members = step(4), pool("a")
    carve(work, "a", 2, members)
    assert work.give_back(Span(2, 4), []) == 0
    assert work.free_batches == 2


def test_a_failed_span_is_lent_again_batch_by_batch() -> None:
    work, members = step(4), pool("a")
    carve(work, "a", 2, members)
    work.failed(Span(0, 2), "a", [])
    assert work.free == [Span(0, 1), Span(1, 2), Span(2, 4)]
    assert carve(work, "a", 4, members) == Span(0, 1)


def test_a_batch_that_failed_on_a_node_is_tried_on_another() -> None:
    work, members = step(2), pool("a", "b")
    carve(work, "a", 1, members)
    work.failed(Span(0, 1), "a", [])
    assert carve(work, "a", 1, members) == Span(1, 2)
    assert work.carve("a", 1, members) is None
    assert carve(work, "b", 1, members) == Span(0, 1)


def test_a_node_alone_tries_again() -> None:
    work, members = step(1), pool("a")
    carve(work, "a", 1, members)
    work.failed(Span(0, 1), "a", [])
    assert carve(work, "a", 1, members) == Span(0, 1)


def test_a_batch_is_hopeless_after_three_failures_on_two_nodes() -> None:
    work, members = step(1), pool("a", "b")
    for node, is_hopeless in (("a", False), ("b", False), ("a", True)):
        work.failed(Span(0, 1), node, [])
        assert work.is_hopeless(Span(0, 1), members, []) == is_hopeless


def test_three_failures_on_one_node_prove_nothing_while_others_are_there() -> None:
    work = step(1)
    for _ in range(3):
        work.failed(Span(0, 1), "a", [])
    assert not work.is_hopeless(Span(0, 1), pool("a", "b"), [])
    assert work.is_hopeless(Span(0, 1), pool("a"), [])


def test_two_who_fail_do_not_speak_for_a_larger_pool() -> None:
    """Two that lie could end the run, by giving numbers that are not finite for what others compute well."""
    work, members = step(1), pool("a", "b", "c", "d", "e", "f")
    for node, is_hopeless in (("a", False), ("b", False), ("a", False), ("c", False), ("d", True)):
        work.failed(Span(0, 1), node, [])
        assert work.is_hopeless(Span(0, 1), members, []) == is_hopeless


def test_in_a_crowd_five_are_asked() -> None:
    work, members = step(1), pool(*map(str, range(1000)))
    for node in range(5):
        assert not work.is_hopeless(Span(0, 1), members, [])
        work.failed(Span(0, 1), str(node), [])
    assert work.is_hopeless(Span(0, 1), members, [])


def test_several_batches_are_never_hopeless_together() -> None:
    """Copies of one span may fail on three nodes before any of its batches was tried alone."""
    work, members = step(4), pool("a", "b", "c")
    for node in ("a", "b", "c"):
        work.failed(Span(0, 4), node, [])
    assert not work.is_hopeless(Span(0, 4), members, [])


def test_a_batch_goes_to_whoever_it_failed_on_least() -> None:
    work, members = step(1), pool("a", "b")
    carve(work, "a", 1, members)
    for node in ("a", "b", "b"):
        work.failed(Span(0, 1), node, [])
    assert work.carve("b", 1, members) is None
    assert carve(work, "a", 1, members) == Span(0, 1)
