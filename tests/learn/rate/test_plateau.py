"""ReduceLROnPlateau: which metric steps it, what is refused, and that a checkpoint keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from tests.learn.jobs import make, mlp, settings
from tests.learn.summing import Complete, planned
from w5xde.errors import W5xdeError
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.rate.plateau import choose_metric
from w5xde.learn.step.checkpoint import capture, restore


def plateau(mode: Any = "min") -> ReduceLROnPlateau:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return ReduceLROnPlateau(optimizer, mode)


@pytest.mark.parametrize(
    ("mode", "metrics", "named", "chosen"),
    [
        ("min", ["error"], None, "error"),
        ("max", ["accuracy"], None, "accuracy"),
        ("min", ["accuracy", "loss"], None, "loss"),
        ("max", ["accuracy", "loss"], "accuracy", "accuracy"),
        ("min", ["a", "b"], "b", "b"),
    ],
)
def test_the_metric_that_steps_the_schedule(
    mode: str, metrics: list[str], named: str | None, chosen: str
) -> None:
    assert choose_metric(plateau(mode), metrics, settings(plateau_metric=named)) == chosen


@pytest.mark.parametrize(
    ("mode", "metrics", "more", "code"),
    [
        ("min", [], {}, "W5-228"),
        ("max", ["accuracy", "loss"], {}, "W5-264"),
        ("min", ["a", "b"], {}, "W5-264"),
        ("min", ["loss"], {"plateau_metric": "lost"}, "W5-264"),
        ("min", ["loss"], {"evaluate": "skip"}, "W5-264"),
        ("min", ["loss"], {"durability": "step"}, "W5-264"),
    ],
)
def test_what_would_make_the_rate_a_matter_of_luck_is_refused(
    mode: str, metrics: list[str], more: dict[str, Any], code: str
) -> None:
    with pytest.raises(W5xdeError) as caught:
        choose_metric(plateau(mode), metrics, settings(**more))
    assert caught.value.code == code
    assert caught.value.fix


def test_other_schedules_need_no_metric() -> None:
    other = StepLR(plateau().optimizer, 3)
    assert choose_metric(other, [], settings(evaluate="skip")) == ""
    assert choose_metric(None, ["loss"], settings()) == ""
    with pytest.raises(W5xdeError) as caught:
        choose_metric(other, ["loss"], settings(plateau_metric="loss"))
    assert caught.value.code == "W5-264"


def prepared(**more: Any) -> Prepared:
    job = make(
        mlp(),
        scheduler=lambda opt: ReduceLROnPlateau(opt, factor=0.5, patience=0),
        evaluate=lambda model: {"loss": 1.0},
    )
    return prepare(job, settings(**more))


def test_steps_do_not_step_it_and_each_measured_step_does_once() -> None:
    learner = prepared().learner
    body = bytes(learner.vector_bytes)
    for step in range(3):
        learner.replay(Complete(planned(step, [1])), body, frozenset(), 1.0)
    assert learner.learning_rates == [0.1]
    assert learner.measured(3, 1.0) == [0.1]
    assert learner.measured(3, 1.0) == [0.1]
    assert learner.measured(4, 1.0) == [0.05]
    assert learner.measured(4, 2.0) == [0.05]
    assert learner.measured(6, 2.0) == [0.025]


def test_a_checkpoint_keeps_it() -> None:
    first, second = prepared().learner, prepared().learner
    first.measured(3, 1.0)
    first.measured(4, 1.0)
    files = {name: b"".join(map(bytes, pieces)) for name, pieces in capture(first).files().items()}
    restore(second, files)
    assert second.learning_rates == [0.05]
    assert second.measured_step == 4
    assert second.measured(4, 2.0) == [0.05]
    assert second.measured(5, 2.0) == first.measured(5, 2.0) == [0.025]


def test_rounds_have_the_new_rate_from_the_next_one_on() -> None:
    job = prepared(mode="rounds", batches_per_step=2, round_rate=1.0)
    assert job.rounds is not None
    assert job.rounds.step_rates(0, 3).of_steps == [[0.1]] * 3
    job.learner.measured(1, 1.0)
    job.learner.measured(2, 1.0)
    assert job.rounds.step_rates(0, 3).of_steps == [[0.05]] * 3
