"""`bench costs` of an own loop is not timed here: it must run, and its figures must fit each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.commands.benches import run_benches
from w5xde.bench.suites import costs


def test_an_own_loop_is_compared_with_a_run_of_as_many_batches_a_step(tmp_path: Path) -> None:
    command = ["costs", "--rows", "own-loop-2", "--nodes", "7", "--pairs", "1", "--seconds", "0.4"]
    [row] = run_benches({"costs": command}, tmp_path)["costs"]["rows"]
    assert (row["asked"], row["nodes"], row["batches_per_step"]) == (0.1, 2, 2)
    own, run = row["runs"]
    assert row["ratios"] == pytest.approx([own["batches_per_second"] / run["batches_per_second"]])
    assert row["cost"] == pytest.approx(1 - row["ratios"][0])
    assert row["verdict"] == costs.verdict(row["cost_low"], row["cost_high"], row["asked"])
    assert own["batches"] == 2 * own["steps"] > 0
    for each in (own, run):
        assert each["batches_per_second"] == pytest.approx(each["batches"] / each["seconds"])
        assert each["processes"] == 2
    # The run was counted again by its ledger; an own loop has none.
    assert run["ledger_batches"] == run["batches_in_all"]
    assert "ledger_batches" not in own
    # Both train: a first loss is that of a guess among 128 symbols.
    assert 0 < own["loss_all_samples"] < 4.85
