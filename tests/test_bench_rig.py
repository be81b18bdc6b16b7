"""The rig of slow links, as far as it needs no network: names, rates, ratios, tables and pictures."""

from __future__ import annotations

import argparse
import sys

import pytest

from w5xde.bench.measure.curves import Curve, CurveMark, Reached, reached
from w5xde.bench.rig.entrants import DEFAULT, NAMES, OURS, PEERS, Entrant, entrant, require_modes
from w5xde.bench.rig.link_check import check_rig
from w5xde.bench.rig.low_talk import METHODS
from w5xde.bench.rig.namespaces import Rig, SlowLink
from w5xde.bench.rig.suite import RaceEnd, compare, over
from w5xde.bench.show import plots, tables
from w5xde.bench.show.slow_links import over_text, tick_text
from w5xde.errors import TrainingError, UsageError

MACHINE = {"cores": 2, "processor": "one", "python": "3.11", "torch": "2", "torch_threads": 1}


def finish(seconds: float, samples: float, megabytes: float, *, is_reached: bool = True) -> RaceEnd:
    return RaceEnd(Reached(seconds, samples, 1e6 * megabytes), is_reached, 0.5)


# --- who takes part -------------------------------------------------------------------------------


def test_a_contestant_may_have_a_learning_rate_of_its_own():
    assert entrant("diloco-50") == Entrant("diloco-50")
    other = entrant("diloco-50@0.003")
    assert (other.learning_rate, other.label) == (0.003, "diloco-50@0.003")
    assert other.title == "DiLoCo, every 50 steps, rate 0.003"


@pytest.mark.parametrize("text", ["diloco", "diloco-7", "ddp@", "ddp@fast", "ddp@-1"])
def test_what_is_no_contestant_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        entrant(text)


def test_every_contestant_has_a_title_and_every_peer_a_method():
    assert len({Entrant(name).title for name in NAMES}) == len(NAMES)
    assert {name.partition("-")[0] for name in PEERS} == {*METHODS, "torchft"}


def test_all_have_the_same_rate_unless_another_is_asked_for():
    assert len({Entrant(name).learning_rate for name in NAMES}) == 1


def test_a_mode_that_this_version_does_not_have_is_refused(monkeypatch):
    monkeypatch.setitem(OURS, "ours-tomorrow", {"mode": "tomorrow"})
    require_modes(DEFAULT)
    with pytest.raises(UsageError, match="does not have its mode") as refused:
        require_modes([Entrant("ours-tomorrow")])
    assert refused.value.fix == "leave out ours-tomorrow"


# --- links ----------------------------------------------------------------------------------------


def test_a_link_holds_a_burst_for_a_tick_of_the_clock_and_a_queue_for_its_round_trips():
    slow, fast = SlowLink(10, 50), SlowLink(1000, 50)
    assert (slow.burst_bytes, slow.queue_bytes) == (16_000, 187_500)
    assert fast.burst_bytes == 1_000_000
    assert SlowLink(1, 0).queue_bytes == 64_000


@pytest.mark.parametrize(
    ("delays", "rates", "wrong"),
    [
        ([50.4, 51.0], [9.9, 10.1], ""),
        ([56.0, 50.0], [10.0, 10.0], "a delay of 56 ms instead of 50"),
        ([50.0, 50.0], [10.0, 8.9], "a rate of 8.9 Mbit/s instead of 10"),
    ],
)
def test_a_link_that_is_a_tenth_off_stops_the_benchmark(monkeypatch, delays, rates, wrong):
    monkeypatch.setattr("w5xde.bench.rig.link_check._delays", lambda rig: delays)
    monkeypatch.setattr("w5xde.bench.rig.link_check._rates", lambda rig: (rates, rates))
    rig = Rig(SlowLink(10, 50), None, [], 0)  # type: ignore[arg-type]
    if not wrong:
        assert check_rig(rig)["up_mbit_per_second"] == rates
        return
    with pytest.raises(TrainingError, match=wrong):
        check_rig(rig)


# --- curves ---------------------------------------------------------------------------------------


def test_bytes_to_the_target_lie_between_the_marks_as_seconds_do():
    marks = [CurveMark(10.0 * at, 100 * at, 5.0 - at, bytes_moved=1000 * at) for at in range(6)]
    found = reached(marks, 2.5, within_samples=50)
    assert found == Reached(pytest.approx(25), pytest.approx(250), pytest.approx(2500))


def test_marks_far_apart_are_not_averaged():
    # A loss that falls ever slower: averages with far neighbours are above it.
    marks = [CurveMark(at, 1000 * at, 8 / 2**at) for at in range(7)]
    alone, averaged = reached(marks, 1.0, within_samples=500), reached(marks, 1.0)
    assert alone is not None
    assert averaged is not None
    assert alone.samples == pytest.approx(3000)
    assert averaged.samples > alone.samples


def test_utilisation_is_the_share_of_the_whole_run():
    assert Curve([], seconds=20.0, seconds_computing=5.0).utilisation == 0.25
    assert Curve([], seconds=20.0).utilisation is None


# --- what the figures say -------------------------------------------------------------------------


def test_a_ratio_compares_runs_of_the_same_seed():
    ddp, own = [finish(100, 10, 80), finish(200, 10, 60)], [finish(10, 12, 1), finish(50, 12, 2)]
    assert over(ddp, own, "seconds") == {"median": 7.0, "low": 4.0, "high": 10.0, "is_a_bound": False}
    assert over(ddp, own, "bytes_moved")["median"] == pytest.approx(55)


def test_a_ratio_to_a_contestant_that_gave_up_is_a_bound():
    gave_up = [finish(600, 10, 80, is_reached=False)]
    found = over(gave_up, [finish(60, 12, 1)], "seconds")
    assert (found["median"], found["is_a_bound"]) == (10.0, True)
    assert over_text(found) == "> 10.00×"


def test_who_gave_up_has_no_ratio():
    found = over([finish(60, 12, 1)], [finish(600, 10, 80, is_reached=False)], "seconds")
    assert found["median"] == 0.0
    assert over_text(found) == "–"
    assert over_text(over(None, [finish(60, 12, 1)], "seconds")) == "–"


def results() -> dict:
    entrants = [entrant(name) for name in ("ours-sync", "ddp", "diloco-50", "powersgd-1")]
    finishes = {
        "ours-sync": [finish(90, 20_000, 70), finish(95, 21_000, 72)],
        "ddp": [finish(100, 20_000, 80), finish(110, 21_000, 84)],
        "diloco-50": [finish(20, 40_000, 2), finish(22, 44_000, 3)],
        "powersgd-1": [finish(600, 9_000, 9, is_reached=False)] * 2,
    }
    link = {
        "mbit_per_second": 10.0,
        "delay_ms": 50.0,
        "check": {
            "delays_ms": [50.2, 50.4],
            "up_mbit_per_second": [10.0, 9.99],
            "down_mbit_per_second": [10.0, 10.01],
        },
        "carrier_part": 0.04,
        "targets": [2.1, 2.2],
        "plain": {"seconds": 12.0, "samples": 10_000.0},
        **compare(entrants, finishes),
    }
    return {
        "bench": "rig",
        "parameters": 94_640,
        "nodes": 2,
        "batch_size": 16,
        "budget_batches": 900,
        "patience_seconds": 600.0,
        "seeds": 2,
        "rows": [link, link],
        "machine": MACHINE,
    }


def test_the_best_peer_is_none_of_ours_and_has_reached_the_target():
    [link, _] = results()["rows"]
    assert link["best_peers"] == {"seconds": "diloco-50", "samples": "ddp", "bytes_moved": "diloco-50"}
    rows = {row["name"]: row for row in link["contestants"]}
    assert rows["ours-sync"]["over_best_peer"]["seconds"]["median"] < 1
    assert rows["diloco-50"]["over_ours_sync"]["bytes_moved"]["high"] == pytest.approx(35)
    assert (rows["powersgd-1"]["reached"], rows["powersgd-1"]["seconds"]) == (0, None)
    assert rows["ddp"]["over_ddp"]["seconds"]["median"] == 1.0


def test_rows_that_lost_or_gave_up_are_shown_and_drawn(capsys, tmp_path):
    tables.show(results(), sys.stdout)
    shown = capsys.readouterr().out
    assert "DDP, PowerSGD of rank 1" in shown
    assert "0 of 2" in shown
    assert "measured before: 9.99 – 10.01 Mbit/s, 50.2 – 50.4 ms" in shown
    assert "than diloco-50" in shown
    plots.draw(results(), tmp_path / "rig.png")
    assert (tmp_path / "rig.png").stat().st_size > 10_000


def test_a_paced_job_is_called_paced(capsys, tmp_path):
    share = {"median": 0.5, "low": 0.4, "high": 0.6}
    row = {"name": "ddp", "title": "DDP, 32 bits", "settings": None, "utilisation": share}
    row |= {"samples_per_second": share, "bytes_per_sample": share}
    found = results() | {"bench": "utilisation", "seconds": 60.0, "paced_seconds": 0.4}
    found["rows"] = [link | {"contestants": [row]} for link in found["rows"]]
    tables.show(found, sys.stdout)
    assert "PACED: each batch sleeps after its computation until 400.0 ms are over" in capsys.readouterr().out
    plots.draw(found, tmp_path / "busy.png")
    tables.show(found | {"paced_seconds": 0.0}, sys.stdout)
    assert "PACED" not in capsys.readouterr().out


def test_axes_have_round_numbers_with_units():
    assert [tick_text(tick, "bytes_moved") for tick in (10.0, 2e4, 5e6, 1e9)] == [
        "10 B",
        "20 kB",
        "5 MB",
        "1 GB",
    ]
    assert tick_text(1000.0, "seconds") == "1,000 s"
