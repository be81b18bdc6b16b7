"""The plan hands out every batch of every epoch once, in order, however the epoch is cut into steps."""

from __future__ import annotations

import pytest

from w5xde.control.steps.plan import Cursor, Plan, StepPlan


def plan(
    *,
    samples: int | None = 10,
    size: int = 2,
    step: int = 2,
    epochs: int | None = 1,
    steps: int | None = None,
) -> Plan:
    return Plan(step_batches=step, epoch_limit=epochs, step_limit=steps, samples=samples, batch_size=size)


def all_steps(of: Plan) -> list[StepPlan]:
    found = []
    while (step := of.next_step()) is not None:
        found.append(step)
    return found


def test_an_epoch_is_cut_into_steps_of_so_many_batches() -> None:
    assert all_steps(plan(samples=8)) == [
        StepPlan(index=0, epoch=0, first=0, sizes=(2, 2), ends_epoch=False),
        StepPlan(index=1, epoch=0, first=2, sizes=(2, 2), ends_epoch=True),
    ]


def test_the_last_step_has_fewer_batches_and_the_last_batch_fewer_samples() -> None:
    last = all_steps(plan(samples=9))[-1]
    assert (last.first, last.sizes, last.ends_epoch) == (4, (1,), True)


def test_a_step_larger_than_the_epoch_is_the_epoch() -> None:
    only = all_steps(plan(samples=5, step=64))
    assert [step.sizes for step in only] == [(2, 2, 1)]
    assert only[0].ends_epoch


def test_steps_never_span_epochs() -> None:
    steps = all_steps(plan(samples=6, epochs=3))
    assert [(step.epoch, step.first, step.count) for step in steps] == [
        (0, 0, 2), (0, 2, 1), (1, 0, 2), (1, 2, 1), (2, 0, 2), (2, 2, 1),
    ]  # fmt: skip
    assert [step.index for step in steps] == list(range(6))


@pytest.mark.parametrize("samples", range(1, 30))
@pytest.mark.parametrize("step", [1, 3, 8])
def test_every_sample_is_planned_once_per_epoch(samples: int, step: int) -> None:
    steps = all_steps(plan(samples=samples, size=3, step=step, epochs=2))
    for epoch in range(2):
        mine = [s for s in steps if s.epoch == epoch]
        assert sum(s.samples for s in mine) == samples
        assert [s.first for s in mine] == [sum(s.count for s in mine[:i]) for i in range(len(mine))]
        assert [s.ends_epoch for s in mine] == [False] * (len(mine) - 1) + [True]


def test_a_limit_of_steps_may_end_in_the_middle_of_an_epoch() -> None:
    limited = plan(samples=100, steps=3, epochs=None)
    assert len(all_steps(limited)) == 3
    assert limited.is_over


def test_without_a_limit_of_epochs_there_is_always_another() -> None:
    endless = plan(samples=4, epochs=None, steps=1000)
    assert all_steps(endless)[-1].epoch == 999


def test_the_number_of_steps_is_told_where_it_can_be_known() -> None:
    assert plan(samples=9, epochs=3).steps_total == 9
    assert plan(samples=9, epochs=3, steps=4).steps_total == 4
    assert plan(samples=9, epochs=None, steps=4).steps_total == 4
    assert plan(samples=None, epochs=3).steps_total is None
    assert len(all_steps(plan(samples=9, epochs=3))) == 9


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_waits_for_one_batch_more_than_the_step() -> None:
    """Or its last step could not tell that it is the last."""
    stream = plan(samples=None)
    stream.discovered(0, 2)
    stream.discovered(0, 2)
    assert stream.next_step() is None
    assert not stream.is_over
    stream.discovered(0, 2)
    assert stream.next_step() == StepPlan(0, 0, 0, (2, 2), ends_epoch=False)
    assert stream.next_step() is None


def test_a_stream_that_ends_with_a_whole_step_knows_it() -> None:
    stream = plan(samples=None)
    for samples in (2, 2, 0):
        stream.discovered(0, samples)
    assert stream.next_step() == StepPlan(0, 0, 0, (2, 2), ends_epoch=True)
    assert stream.is_over


def test_the_epochs_of_a_stream_may_differ_in_length() -> None:
    stream = plan(samples=None, epochs=2)
    for epoch, samples in ((0, 2), (0, 0), (1, 2), (1, 2), (1, 1), (1, 0)):
        stream.discovered(epoch, samples)
    steps = all_steps(stream)
    assert [(s.epoch, s.first, s.sizes, s.ends_epoch) for s in steps] == [
        (0, 0, (2,), True), (1, 0, (2, 2), False), (1, 2, (1,), True),
    ]  # fmt: skip
    assert stream.is_over


def test_a_batch_of_the_wrong_epoch_is_our_bug() -> None:
    with pytest.raises(ValueError, match="epoch 1 discovered in epoch 0"):
        plan(samples=None).discovered(1, 2)


def test_a_plan_of_known_length_discovers_nothing() -> None:
    with pytest.raises(ValueError, match="discovered"):
        plan(samples=4).discovered(0, 2)


def all_stretches(of: Plan, most: int) -> list[StepPlan]:
    found = []
    while (stretch := of.next_stretch(most)) is not None:
        found.append(stretch)
    return found


def test_steps_of_one_batch_can_be_planned_as_stretches() -> None:
    found = all_stretches(plan(samples=9, step=1, epochs=2), 3)
    assert [(s.index, s.epoch, s.first, s.sizes, s.ends_epoch) for s in found] == [
        (0, 0, 0, (2, 2, 2), False), (3, 0, 3, (2, 1), True),
        (5, 1, 0, (2, 2, 2), False), (8, 1, 3, (2, 1), True),
    ]  # fmt: skip
    assert all(stretch.apart and stretch.steps == stretch.count for stretch in found)
    singles = [single for stretch in found for single in stretch.split]
    assert singles == all_steps(plan(samples=9, step=1, epochs=2))


def test_a_stretch_ends_with_the_steps_of_the_run() -> None:
    assert [s.sizes for s in all_stretches(plan(samples=9, step=1, steps=4), 3)] == [(2, 2, 2), (2,)]


def test_a_stretch_of_a_stream_is_what_is_known_but_for_one() -> None:
    stream = plan(samples=None, step=1)
    assert stream.next_stretch(8) is None
    stream.discovered(0, 2)
    assert stream.next_stretch(8) is None
    stream.discovered(0, 2)
    stream.discovered(0, 2)
    assert stream.next_stretch(8) == StepPlan(0, 0, 0, (2, 2), ends_epoch=False, apart=True)
    stream.discovered(0, 0)
    assert stream.next_stretch(8) == StepPlan(2, 0, 2, (2,), ends_epoch=True, apart=True)


def test_a_stretch_that_was_lost_is_planned_again_one_by_one() -> None:
    before = plan(samples=10, step=1)
    lost = before.next_stretch(3)
    assert lost is not None
    after = plan(samples=10, step=1)
    after.resume(before.cursor, [lost])
    assert all_steps(after) == all_steps(plan(samples=10, step=1))


def test_a_step_has_its_number_in_the_plan_and_one_that_is_tried_again_that_of_the_resume() -> None:
    of = plan(samples=40)
    assert [of.number_of(step) for step in all_steps(of)] == list(range(10))
    again = plan(samples=40)
    again.resume(Cursor(7, 0, 14), [StepPlan(5, 0, 10, (2, 2), ends_epoch=False)])
    again.retry_batch(0, 3, 2)
    # However far the plan has come: a batch that is computed twice must be at the same place.
    assert [again.number_of(step) for step in all_steps(again)] == [5, 7, 7, 8, 9]
