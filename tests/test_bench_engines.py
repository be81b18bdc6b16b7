"""The figures of `bench engines`, from the moments of steps. Needs no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from w5xde.bench.engines.ray_train import TrainTask
from w5xde.bench.engines.step_times import (
    StepMoment,
    StepPace,
    StepReader,
    complete_at,
    outage_after,
    pace_between,
)
from w5xde.bench.engines.suite import loss_figures, speed_figures, verdict_on
from w5xde.bench.engines.timed_jobs import ENOUGH, JOBS, STEPS, StepNotes
from w5xde.bench.measure.pairs import Turns
from w5xde.callbacks.status import NodeStatus, RunStatus
from w5xde.learn.job.job import load_job


def steps(*lines: tuple[int, float], workers: int = 4) -> list[StepMoment]:
    return [StepMoment(step, at, workers) for step, at in lines]


def test_moments_are_read_while_they_are_written(tmp_path):
    path = tmp_path / STEPS
    reader = StepReader(path)
    assert reader.read() == []
    one, other = steps((1, 10.5), (2, 11.25))
    path.write_text(one.line() + other.line()[:5])
    assert reader.read() == [one]
    path.write_text(one.line() + other.line())
    assert reader.read() == [one, other]
    assert reader.read() == [one, other]


def test_a_run_is_complete_with_the_first_step_of_all_workers():
    moments = [*steps((1, 1.0), workers=1), *steps((2, 2.0), (3, 3.0), workers=2)]
    assert complete_at(moments, 2) == 2.0
    assert complete_at(moments, 3) is None
    assert complete_at([], 1) is None


def test_a_pace_goes_from_step_to_step():
    moments = steps((1, 0.0), (2, 1.0), (3, 1.5), (4, 2.0), (5, 9.0))
    assert pace_between(moments, 0.9, 8.0) == StepPace(2, 1.0)
    # One step begins and ends nothing.
    assert pace_between(moments, 8.5, 9.5) == StepPace(0, 0.0)


def test_a_run_that_goes_on_loses_the_time_between_two_steps():
    moments = steps((1, 0.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 4.0), (6, 4.5))
    found = outage_after(moments, 2.25)
    assert found.seconds_without_step == 1.5
    assert found.seconds_behind == 0.25
    assert found.steps_again == 0


def test_a_run_that_is_set_back_makes_steps_again():
    moments = steps((1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (3, 23.0), (4, 24.0), (5, 25.0))
    found = outage_after(moments, 3.5)
    assert found.seconds_without_step == 20.0
    assert found.seconds_behind == 21.5
    assert found.steps_again == 2


def test_a_run_that_makes_no_step_any_more_has_no_figure():
    found = outage_after(steps((1, 0.0), (2, 1.0)), 1.5)
    assert found.seconds_without_step is None
    assert found.seconds_behind is None


def speed(rate: float, first: float) -> dict[str, float]:
    return {"batches_per_second": rate, "first_step_seconds": first, "complete_seconds": first}


def test_speed_and_first_steps_are_compared_in_pairs():
    turns = Turns([speed(90, 2.0), speed(110, 3.0)], [speed(100, 4.0), speed(100, 4.0)])
    found = speed_figures(turns, asked=None)
    assert found["ratios"] == [0.9, 1.1]
    assert found["ratio"] == pytest.approx(1.0)
    assert found["verdict"] == "even"
    assert found["first_step"]["ratio"] == pytest.approx(0.625)
    assert found["first_step"]["verdict"] == "sooner"
    assert (found["batches_per_second"], found["peer_batches_per_second"]) == (100, 100)
    assert speed_figures(turns, asked=0.95)["verdict"] == "not sure"


def test_without_its_peer_our_run_is_measured_alone():
    found = speed_figures(Turns([speed(90, 2.0)], []), asked=None)
    assert found["batches_per_second"] == 90
    assert found["peer_batches_per_second"] is None
    assert found["ratio"] is None


def test_what_is_asked_is_kept_or_missed_only_if_the_whole_interval_is():
    assert verdict_on(0.95, 1.1, 0.95) == "kept"
    assert verdict_on(0.90, 0.94, 0.95) == "missed"
    assert verdict_on(0.90, 1.1, 0.95) == "not sure"


def loss(without: float | None, *, is_over: bool = True) -> dict[str, object]:
    return {
        "seconds_without_step": without,
        "seconds_behind": without,
        "samples_again": 64,
        "step_seconds_before": 0.1,
        "is_over": is_over,
    }


def test_the_worst_run_decides_whether_a_loss_was_short():
    found = loss_figures(Turns([loss(0.5), loss(1.0), loss(3.0)], [loss(20.0)] * 3), 2.0)
    assert found["seconds_without_step"] == 1.0
    assert found["verdict"] == "missed"
    assert found["ratio"] == pytest.approx(0.05)
    assert loss_figures(Turns([loss(0.5), loss(1.0)], []), 2.0)["verdict"] == "kept"


def test_a_run_that_does_not_go_on_is_counted():
    found = loss_figures(Turns([loss(0.5)], [loss(9.0), loss(None, is_over=False)]), 2.0)
    assert (found["peer_runs"], found["peer_runs_over"]) == (2, 1)
    assert found["peer_seconds_without_step"] == 9.0
    assert found["peer_seconds_without_step_most"] is None


class Stopped:
    """What a callback can ask of its run."""

    reason = ""

    def stop(self, reason: str) -> None:
        self.reason = reason


def test_our_runs_note_their_steps_and_end_when_they_are_told_to(tmp_path: Path):
    nodes = [
        NodeStatus(name, "cpu", "", batches, 0.0, 0.0, None, 0.0) for name, batches in (("a", 3), ("b", 0))
    ]
    control = Stopped()
    run = RunStatus("bench", "sync", "", 1, nodes=nodes, control=control)  # type: ignore[arg-type]
    notes = StepNotes(tmp_path)
    notes.on_start(run)
    notes.on_step(run, 1, 0.5)
    assert not control.reason
    (tmp_path / ENOUGH).touch()
    notes.on_step(run, 2, 0.5)
    notes.on_end(run, {})
    assert control.reason == "measured"
    # Of two nodes one has computed something.
    assert [(each.step, each.workers) for each in StepReader(tmp_path / STEPS).read()] == [(1, 1), (2, 1)]


def test_every_job_can_be_named_and_is_the_one_of_the_other_benchmarks():
    for name, job in JOBS.items():
        timed = load_job(f"w5xde.bench.engines.timed_jobs:{name}")
        assert (timed.model, timed.data, timed.loss) == (job.model, job.data, job.loss)
        assert TrainTask(name, 32, 2, 0).job == name
