"""`bench learn` is not timed here: it must run, and its figures must follow from each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.commands.benches import run_benches
from w5xde.bench.show import plots, tables
from w5xde.bench.suites import sizes

# The benchmarks run once for all tests of this file, so one worker must have them all.
pytestmark = pytest.mark.xdist_group("bench-learn")
PNG = b"\x89PNG\r\n\x1a\n"
COMMANDS = {
    "learn": [
        "learn", "--jobs", "seed", "--rows", "ddp,sync-1", "--nodes", "2", "--seeds", "1", "--budget", "0.02",
    ],
    "sizes": ["learn", "--sizes", "--params", "1e3", "--tensors", "4,400", "--seconds", "0.2"],
    "peers": ["peers", "--rows", "text-one-b4", "--pairs", "1", "--seconds", "0.3"],
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench-learn")


@pytest.fixture(scope="session")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What these benchmarks print with --json; their pictures are drawn too."""
    return run_benches(COMMANDS, folder)


def test_who_learns_the_same_needs_the_same_samples_and_every_figure_is_a_quotient(results):
    [job] = results["learn"]["jobs"]
    plain, ddp, ours = job["rows"]
    assert [row["row"] for row in job["rows"]] == ["plain", "ddp", "sync-1"]
    assert (job["nodes"], job["batch_size"], job["budget_batches"]) == (2, 32, 160)
    # One batch a step in sync mode gives the bits of the plain loop, whichever node computes it. But so short
    # a run is over before it could be looked at as often.
    assert ours["reached"] == 1
    assert ours["samples"] == pytest.approx(plain["samples"], rel=0.25)
    assert job["plain_batches"] == [pytest.approx(plain["samples"] * 32 / 1000)]
    assert plain["speed_up"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert ours["speed_up"]["median"] == pytest.approx(plain["seconds"] / ours["seconds"])
    assert ours["effective_batches_per_second"] == pytest.approx(job["plain_batches"][0] / ours["seconds"])
    assert (plain["settings"], ours["settings"]) == (None, {"batches_per_step": 1})
    assert ddp["over_ddp_is_a_bound"] == (ddp["reached"] == 0)
    losses = [loss for _, _, loss in plain["curve"]]
    assert losses[0] > job["targets"][0] > losses[-1]


def test_the_sweep_has_a_row_for_each_size_that_a_network_can_have(results):
    # A thousand parameters in 400 tensors would be layers of two numbers.
    [row] = results["sizes"]["rows"]
    assert (row["parameters"], row["tensors"]) == (1009, 4)
    for pair in (row["one_node"], row["two_nodes"]):
        assert pair["ratio"] == pytest.approx(pair["batches_per_second"] / pair["peer_batches_per_second"])


@pytest.mark.parametrize(
    ("params", "tensors"), [(1_000, 40), (100_000, 400), (1_000_000, 4), (1_000_000, 40)]
)
def test_a_network_of_the_sweep_has_the_size_that_was_asked_for(params, tensors):
    job = sizes.sized_job(params, tensors)
    shapes = [parameter.numel() for parameter in job.model().parameters()]
    assert len(shapes) == tensors
    assert sum(shapes) == pytest.approx(params, rel=0.15)


def test_a_plain_loop_is_one_process_whatever_it_is_compared_with(results):
    [text] = results["peers"]["rows"]
    assert (text["peer"], text["nodes"], text["batch_size"], text["batches_per_step"]) == (
        "plain loop",
        1,
        4,
        1,
    )
    [plain] = text["theirs"]
    assert plain["processes"] == 1
    assert plain["batches_per_second"] == pytest.approx(plain["steps"] / plain["seconds"])


def test_results_are_drawn_and_shown(results, folder, capsys):
    for name, result in results.items():
        assert (folder / f"{name}.png").read_bytes().startswith(PNG), name
        tables.show(result, sys.stdout)
    shown = capsys.readouterr().out
    assert "sooner than plain" in shown
    assert "two nodes, 2 a step" in shown


def test_a_row_that_did_not_reach_the_target_says_so(results, folder, capsys):
    found = json.loads(json.dumps(results["learn"]))
    nothing = {"median": 0.0, "low": 0.0, "high": 0.0}
    found["jobs"][0]["rows"][-1] |= {"reached": 0, "seconds": None, "samples": None, "speed_up": nothing}
    tables.show(found, sys.stdout)
    assert "not reached (0 of 1)" in capsys.readouterr().out
    plots.draw(found, folder / "lost.png")
    assert (folder / "lost.png").read_bytes().startswith(PNG)
