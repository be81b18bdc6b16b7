"""What a doctor predicts of a link: the formula, its sentence, and rates from probes of growing size."""

from __future__ import annotations

import pytest

from w5xde.doctor.link_probe import PROBE_SECONDS, SIZES, Probe, Transfer, link_of, rate_of
from w5xde.doctor.link_use import (
    SHARE_FEW,
    Bound,
    MeasuredLink,
    MeasuredRate,
    Prediction,
    TimedStep,
)
from w5xde.doctor.remote_checks import use_finding
from w5xde.specs.round_settings import ROUND_STEPS_USUAL

# A million float32 parameters, and a tenth of a second a step.
STEP = TimedStep(0.1, 10**6, 4 * 10**6, samples=32)


def link(
    mbit: float, up_mbit: float | None = None, bound: Bound = "about", trip: float = 0.05
) -> MeasuredLink:
    down, up = (MeasuredRate(each * 10**6 / 8, bound) for each in (mbit, up_mbit or mbit))
    return MeasuredLink(down, up, trip)


# --- the formula ----------------------------------------------------------------------------------


def test_the_shares_are_computing_over_computing_and_talking() -> None:
    predicted = Prediction(STEP, link(8.0), round_steps=50)
    assert predicted.sync == pytest.approx(0.1 / (0.1 + 2 * 3.6 + 0.05))
    assert predicted.rounds == pytest.approx(5.0 / (5.0 + 0.9 + 0.05))
    assert Prediction(STEP, link(8.0)).round_steps == ROUND_STEPS_USUAL


def test_each_direction_counts_with_its_own_rate() -> None:
    predicted = Prediction(STEP, link(80.0, 8.0))
    assert predicted.sync == pytest.approx(0.1 / (0.1 + 0.36 + 3.6 + 0.05))


def test_batches_that_are_sent_count_for_every_step() -> None:
    sent = TimedStep(0.1, 10**6, 4 * 10**6, samples=32, batch_bytes=10**6)
    predicted = Prediction(sent, link(8.0), round_steps=50)
    assert predicted.sync == pytest.approx(0.1 / (0.1 + 7.2 + 1.0 + 0.05))
    assert predicted.rounds == pytest.approx(5.0 / (5.0 + 0.9 + 50.0 + 0.05))
    assert predicted.rounds_without_batches == pytest.approx(Prediction(STEP, link(8.0), 50).rounds)
    assert "with --data local" in predicted.sentence("sync")


# --- the sentence ---------------------------------------------------------------------------------


def test_on_a_slow_link_rounds_are_advised() -> None:
    predicted = Prediction(STEP, link(9.4), round_steps=50)
    assert predicted.sentence("sync") == (
        "at 9.4 Mbit/s and 50 ms, sync would use about 2 % of this machine, rounds of 50 about 86 %:"
        " use --mode rounds"
    )
    assert predicted.advice == "rounds"
    assert use_finding(predicted, "sync").state == "ok"


def test_on_a_fast_link_sync_is_advised() -> None:
    predicted = Prediction(STEP, link(10_000.0, bound="at least", trip=0.0002))
    assert predicted.sentence("sync") == (
        "at more than 10,000 Mbit/s and 0.2 ms, sync would use at least 94 % of this machine:"
        " use --mode sync, which needs fewer samples"
    )
    assert predicted.advice == "sync"


def test_a_run_in_rounds_is_told_what_it_uses_and_whether_sync_is_better() -> None:
    slow, fast = Prediction(STEP, link(9.4, 1.0), 50), Prediction(STEP, link(10_000.0, trip=0.001), 50)
    assert slow.sentence("rounds") == (
        "at 9.4 Mbit/s down, 1 Mbit/s up and 50 ms, this run uses about 55 % of this machine once rounds have"
        " 50 steps"
    )
    assert fast.sentence("rounds").endswith("; --mode sync would use about 94 %, and needs fewer samples")


def test_a_lower_bound_of_the_rate_is_no_more_than_that() -> None:
    text = Prediction(STEP, link(200.0, bound="at least")).sentence("sync")
    assert "sync would use at least 23 %" in text
    assert text.endswith("use --mode rounds, unless the link is far faster than that")
    near = Prediction(STEP, link(200.0, trip=0.0001, bound="at least")).sentence("sync")
    assert near.endswith("try --mode sync first, and --mode rounds if nodes wait")
    mixed = MeasuredLink(MeasuredRate(1e6, "at least"), MeasuredRate(1e3, "at most"), 0.05)
    assert mixed.bound == "about"


def test_a_machine_that_would_mostly_wait_in_either_mode_is_a_warning_with_a_fix() -> None:
    predicted = Prediction(STEP, link(0.1))
    assert predicted.best < SHARE_FEW
    found = use_finding(predicted, "sync")
    assert found.state == "warning"
    assert "larger batches" in found.fix
    assert "sync would use about 1 %" in found.what, "never none of it"


def test_the_numbers_are_there_for_programs() -> None:
    numbers = use_finding(Prediction(STEP, link(8.0), 50), "sync").measured
    assert numbers["down_bytes_per_second"] == numbers["up_bytes_per_second"] == 10**6
    assert (numbers["down_bound"], numbers["round_trip_seconds"]) == ("about", 0.05)
    assert (numbers["step_seconds"], numbers["parameters"], numbers["round_steps"]) == (0.1, 10**6, 50)
    assert (numbers["share_sync"], numbers["share_rounds"]) == (0.0136, 0.8403)
    assert numbers["advice"] == "rounds"


# --- rates from probes ----------------------------------------------------------------------------


def transfers(bytes_per_second: float, at_once: int = 0, overhead: float = 0.0) -> list[Transfer]:
    taken = [(size, overhead + (size - at_once) / bytes_per_second) for size in SIZES]
    return [Transfer(size, seconds, seconds) for size, seconds in taken]


@pytest.mark.parametrize("at_once", [0, SIZES[0]])
@pytest.mark.parametrize("overhead", [0.0, 0.3])
def test_a_rate_does_not_depend_on_what_passes_at_once_nor_on_what_every_probe_costs(
    at_once: int, overhead: float
) -> None:
    found = rate_of(transfers(1e6, at_once, overhead), 0.01)
    assert found.bytes_per_second == pytest.approx(1e6)
    assert found.bound == "about"


def test_a_link_that_is_too_fast_has_a_lower_bound_from_the_whole_time() -> None:
    short = [Transfer(size, 0.001, 0.004) for size in SIZES]
    assert rate_of(short, 0.0001) == MeasuredRate(SIZES[-1] / 0.004, "at least")
    # Ten round trips to a far machine say little of its rate.
    assert rate_of(transfers(1e7), 0.1).bound == "at least"


def test_one_probe_is_enough_if_it_is_slow() -> None:
    assert rate_of(transfers(1e4)[:1], 0.01) == MeasuredRate(pytest.approx(1e4))


def test_a_probe_that_does_not_end_bounds_the_rate_from_above() -> None:
    first = transfers(1e6)[0]
    upward = link_of([Probe(first, first), Probe(transfers(1e6)[1], None)], 0.01)
    assert upward.up == MeasuredRate(SIZES[1] / PROBE_SECONDS, "at most")
    assert upward.down.bytes_per_second == pytest.approx(1e6)
    assert upward.bound == "at most"
    neither = link_of([Probe(None, None)], 0.01)
    assert neither.down == neither.up == MeasuredRate(SIZES[0] / PROBE_SECONDS, "at most")
