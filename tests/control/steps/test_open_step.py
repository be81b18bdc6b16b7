"""A step in progress: every batch is free, in hands, or in; a bad one is found out batch by batch."""

from __future__ import annotations

import itertools

from w5xde.control.pool.members import Members
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span

NUMBERS = itertools.count(1)


def new_step(count: int) -> OpenStep:
    return OpenStep(StepPlan(index=0, epoch=0, first=0, sizes=(1,) * count, ends_epoch=True))


def pool(*names: str) -> Members:
    members = Members()
    for name in names:
        members.join(name, now=0.0)
    return members


def lent(step: OpenStep, node: str, start: int, stop: int) -> Lease:
    return Lease(
        next(NUMBERS), node, step.plan, Span(start, stop), version=0, granted_at=0.0, expected_at=0.0
    )


def take_free_span(step: OpenStep, node: str, want: int, members: Members) -> Span:
    span = step.take_free_span(node, want, members)
    assert span is not None
    return span


def test_spans_are_carved_along_the_tree_lowest_first() -> None:
    step, members = new_step(8), pool("a")
    assert take_free_span(step, "a", 2, members) == Span(0, 2)
    assert take_free_span(step, "a", 2, members) == Span(2, 4)
    assert take_free_span(step, "a", 3, members) == Span(4, 6)
    assert step.free_batches == 2
    assert take_free_span(step, "a", 64, members) == Span(6, 8)
    assert step.take_free_span("a", 1, members) is None


def test_a_span_comes_back_whole() -> None:
    step, members = new_step(4), pool("a")
    assert take_free_span(step, "a", 4, members) == Span(0, 4)
    assert step.give_back(Span(0, 4), []) == 4
    assert step.free == [Span(0, 4)]


def test_what_is_in_does_not_come_back() -> None:
    step, members = new_step(4), pool("a", "b")
    take_free_span(step, "a", 4, members)
    step.tree.put(Span(0, 2), [(0, 2, "b")])
    assert step.give_back(Span(0, 4), []) == 2
    assert step.free == [Span(2, 4)]


def test_what_is_in_other_hands_does_not_come_back() -> None:
    """Whole or in part: two idle nodes may share a copy of a long lease between them."""
    step, members = new_step(4), pool("a", "b", "c")
    take_free_span(step, "a", 4, members)
    assert step.give_back(Span(0, 4), [lent(step, "b", 0, 4)]) == 0
    assert step.give_back(Span(0, 4), [lent(step, "b", 0, 2), lent(step, "c", 2, 4)]) == 0
    assert step.free == []
    assert step.give_back(Span(0, 4), [lent(step, "b", 0, 2)]) == 2
    assert step.free == [Span(2, 4)]


def test_what_is_free_already_is_not_freed_twice() -> None:
    step, members = new_step(4), pool("a")
    take_free_span(step, "a", 2, members)
    assert step.give_back(Span(2, 4), []) == 0
    assert step.free_batches == 2


def test_a_failed_span_is_lent_again_batch_by_batch() -> None:
    step, members = new_step(4), pool("a")
    take_free_span(step, "a", 2, members)
    step.failed(Span(0, 2), "a", [])
    assert step.free == [Span(0, 1), Span(1, 2), Span(2, 4)]
    assert take_free_span(step, "a", 4, members) == Span(0, 1)


def test_a_batch_that_failed_on_a_node_is_tried_on_another() -> None:
    step, members = new_step(2), pool("a", "b")
    take_free_span(step, "a", 1, members)
    step.failed(Span(0, 1), "a", [])
    assert take_free_span(step, "a", 1, members) == Span(1, 2)
    assert step.take_free_span("a", 1, members) is None
    assert take_free_span(step, "b", 1, members) == Span(0, 1)


def test_a_node_alone_tries_again() -> None:
    step, members = new_step(1), pool("a")
    take_free_span(step, "a", 1, members)
    step.failed(Span(0, 1), "a", [])
    assert take_free_span(step, "a", 1, members) == Span(0, 1)


def test_a_batch_is_hopeless_after_three_failures_on_two_nodes() -> None:
    step, members = new_step(1), pool("a", "b")
    for node, is_enough in (("a", False), ("b", False), ("a", True)):
        step.failed(Span(0, 1), node, [])
        assert step.must_set_aside(Span(0, 1), members, []) == is_enough


def test_three_failures_on_one_node_prove_nothing_while_others_are_there() -> None:
    step = new_step(1)
    for _ in range(3):
        step.failed(Span(0, 1), "a", [])
    assert not step.must_set_aside(Span(0, 1), pool("a", "b"), [])
    assert step.must_set_aside(Span(0, 1), pool("a"), [])


def test_two_who_fail_do_not_speak_for_a_larger_pool() -> None:
    """Two that lie could end the run, by giving numbers that are not finite for what others compute well."""
    step, members = new_step(1), pool("a", "b", "c", "d", "e", "f")
    for node, is_enough in (("a", False), ("b", False), ("a", False), ("c", False), ("d", True)):
        step.failed(Span(0, 1), node, [])
        assert step.must_set_aside(Span(0, 1), members, []) == is_enough


def test_in_a_crowd_five_are_asked() -> None:
    step, members = new_step(1), pool(*map(str, range(1000)))
    for node in range(5):
        assert not step.must_set_aside(Span(0, 1), members, [])
        step.failed(Span(0, 1), str(node), [])
    assert step.must_set_aside(Span(0, 1), members, [])


def test_several_batches_are_never_hopeless_together() -> None:
    """Copies of one span may fail on three nodes before any of its batches was tried alone."""
    step, members = new_step(4), pool("a", "b", "c")
    for node in ("a", "b", "c"):
        step.failed(Span(0, 4), node, [])
    assert not step.must_set_aside(Span(0, 4), members, [])


def test_a_batch_goes_to_whoever_it_failed_on_least() -> None:
    step, members = new_step(1), pool("a", "b")
    take_free_span(step, "a", 1, members)
    for node in ("a", "b", "b"):
        step.failed(Span(0, 1), node, [])
    assert step.take_free_span("b", 1, members) is None
    assert take_free_span(step, "a", 1, members) == Span(0, 1)
