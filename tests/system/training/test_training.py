"""Real runs: every sample counted once, every way to read data, the demo and the examples."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import w5xde
from tests.system.harness import JOBS, ROOT, AtStep, ended, forked, pid_of, run_json, when_there
from tests.system.jobs import data
from w5xde.runtime.telemetry.status import RunStatus

SAMPLES = 200
BATCH = 32


def counted(result: w5xde.Result) -> torch.Tensor:
    """How often each sample was applied: its gradients were weighted by its batch's part in its step."""
    return result.model.get_parameter("count").detach()


def expected_weight(step_batches: int) -> torch.Tensor:
    """What one epoch adds to each sample's counter, in the order of the data (no shuffling)."""
    found = torch.zeros(SAMPLES)
    starts = list(range(0, SAMPLES, BATCH))
    for first in range(0, len(starts), step_batches):
        batches = [
            range(start, min(start + BATCH, SAMPLES)) for start in starts[first : first + step_batches]
        ]
        samples = sum(len(batch) for batch in batches)
        for batch in batches:
            found[list(batch)] = len(batch) / samples
    return found


@pytest.mark.parametrize("job", ["counting", "counting_stream"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_sample_counts_once_an_epoch_even_when_nodes_die(job: str, mode: str, tmp_path: Path) -> None:
    def kill(run: RunStatus) -> None:
        os.kill(pid_of(run, "local-1"), 9)

    step_batches = 4 if mode == "sync" else 1
    result = w5xde.train(
        f"{JOBS}:{job}",
        nodes=3,
        mode=mode,
        epochs=3,
        shuffle=False,
        batches_per_step=step_batches,
        runs=str(tmp_path),
        callbacks=[AtStep({3: kill})],
    )
    assert result.summary["epochs"] == 3
    assert result.summary["samples"] == 3 * SAMPLES
    torch.testing.assert_close(counted(result), 3 * expected_weight(step_batches), rtol=1e-6, atol=0)


def test_async_refuses_what_is_too_old_and_still_counts_every_sample_once(tmp_path: Path) -> None:
    result = w5xde.train(
        f"{JOBS}:counting", nodes=4, mode="async", staleness=0, epochs=4, shuffle=False, runs=str(tmp_path)
    )
    torch.testing.assert_close(counted(result), torch.full((SAMPLES,), 4.0))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_loss_falls(mode: str, tmp_path: Path) -> None:
    result = w5xde.train(f"{JOBS}:job", nodes=2, mode=mode, epochs=100, runs=str(tmp_path))
    inputs, labels = data().tensors
    # Over all the data: the last step of an async run is one short batch, whose own loss is mostly chance.
    trained = float(cross_entropy(result.model.eval()(inputs), labels).detach())
    assert trained < 0.85 * math.log(4)


def weights(tmp_path: Path, job: str, **settings: Any) -> str:
    result = w5xde.train(f"{JOBS}:{job}", epochs=3, runs=str(tmp_path), **settings)
    return str(result.summary["weights_sha256"])


def test_local_data_gives_the_same_bits_as_streamed_batches(tmp_path: Path) -> None:
    assert weights(tmp_path, "job", nodes=2, data="local") == weights(tmp_path, "job", nodes=2)


def test_augmented_data_is_the_same_whoever_reads_it(tmp_path: Path) -> None:
    streamed = weights(tmp_path, "augmented", nodes=2)
    assert streamed == weights(tmp_path, "augmented", nodes=1, loader_workers=2)
    assert streamed == weights(tmp_path, "augmented", nodes=3, data="local")


def test_a_large_model_on_threads_gives_the_same_bits_as_a_small_one_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline = weights(tmp_path, "job", nodes=2)
    monkeypatch.setattr("w5xde.runtime.coordinator.body.INLINE_VECTOR_BYTES", 0)
    monkeypatch.setattr("w5xde.runtime.node.executor.INLINE_WORK_SECONDS", 0.0)
    monkeypatch.setattr("w5xde.runtime.coordinator.loader.INLINE_READ_SECONDS", 0.0)
    assert weights(tmp_path, "job", nodes=2) == inline


class Watch(w5xde.Callback):
    """Notes when steps were applied, and what else was told."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.told: list[str] = []

    def on_start(self, run: RunStatus) -> None:
        self.told.append(f"start {run.run}")

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        self.times.append(time.monotonic())

    def on_node_join(self, run: RunStatus, node: str) -> None:
        self.told.append(f"join {node}")

    def on_end(self, run: RunStatus, summary: dict[str, Any]) -> None:
        self.told.append(f"end after {summary['steps']} steps")


def test_one_node_ten_times_slower_costs_at_most_fifteen_percent(tmp_path: Path) -> None:
    watch, fast, slow, step_batches = Watch(), 0.03, 0.3, 32
    ticket = tmp_path / "ticket"

    def join(name: str, seconds: float) -> Callable[[], object]:
        def work() -> object:
            os.environ["TEST_BATCH_SECONDS"] = str(seconds)
            return w5xde.join(f"@{when_there(ticket)}", f"{JOBS}:slow", node_name=name)

        return work

    with ExitStack() as stack:
        nodes = [
            stack.enter_context(forked(join(name, seconds)))
            for name, seconds in [("a", fast), ("b", fast), ("c", fast), ("snail", slow)]
        ]
        result = w5xde.serve(
            f"{JOBS}:slow",
            port=0,
            ticket_file=str(ticket),
            steps=16,
            batch_size=6,
            batches_per_step=step_batches,
            runs=str(tmp_path),
            callbacks=[watch],
        )
        assert [ended(node) for node in nodes] == [0] * 4
    assert "end after 16 steps" in watch.told
    # What a batch really took each node, computing included; while all four were there and known.
    took = {n["name"]: n["seconds_busy"] / max(1, n["batches"]) for n in result.summary["nodes"]}
    ideal = step_batches / sum(1 / max(took[name], fast) for name in ("a", "b", "c")) if took else 0.0
    ideal = step_batches / (step_batches / ideal + 1 / slow)
    # Steps alternate between 32 and 2 batches (34 an epoch): whole ones only, after the first few.
    whole = [b - a for a, b in zip(watch.times[4::2], watch.times[5::2], strict=False)]
    partial = [b - a for a, b in zip(watch.times[5::2], watch.times[6::2], strict=False)]
    steps = whole if sum(whole) / len(whole) > sum(partial) / len(partial) else partial
    # The median, so that one hiccup of a busy test machine does not decide.
    assert statistics.median(steps) < 1.15 * ideal, (steps, ideal, took)


def test_the_demo_learns_digits_and_its_weights_are_those_of_one_process(tmp_path: Path) -> None:
    summary = run_json("demo", cwd=tmp_path)
    assert summary["metrics"]["accuracy"] >= 0.96
    assert summary["seconds"] < 30
    assert summary["weights_sha256"] == summary["alone_sha256"]
    assert len(summary["nodes"]) == 3


def test_the_seeds_benchmark_learns_with_ten_nodes(tmp_path: Path) -> None:
    job = str(ROOT / "examples" / "seed_mlp.py")
    summary = run_json("train", job, "--nodes", "10", "--steps", "500", cwd=tmp_path)
    assert summary["loss_first"] > 2.0
    assert summary["loss_last"] < 1.0


def test_the_text_example_trains(tmp_path: Path) -> None:
    job = str(ROOT / "examples" / "text.py")
    summary = run_json("train", job, "--nodes", "2", "--steps", "6", "--batches-per-step", "2", cwd=tmp_path)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["metrics"]["validation_loss"] > 0
