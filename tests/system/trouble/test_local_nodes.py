"""Local nodes in real processes: a run never waits in silence for nodes that cannot come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import w5xde
from tests.processes import JOBS, PATIENCE_SECONDS, AtStep, command, events, pid_of, run_python, wait_until
from w5xde.callbacks.status import RunStatus
from w5xde.runtime.system import capacity

# Ends a run that waits for ever, so that its test fails instead of hanging.
RUN_SECONDS_MAX = 40


@contextmanager
def frozen() -> Iterator[list[int]]:
    """Processes that the test freezes, to be killed at its end."""
    pids: list[int] = []
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def fork_server_of(run: RunStatus) -> psutil.Process:
    parent = psutil.Process(pid_of(run, "local-2")).parent()
    assert parent is not None
    return parent


def test_a_fork_server_that_dies_while_a_node_is_frozen_is_started_again(tmp_path: Path) -> None:
    with frozen() as pids:

        def freeze_and_kill(run: RunStatus) -> None:
            pids.append(pid_of(run, "local-1"))
            os.kill(pids[0], signal.SIGSTOP)
            fork_server_of(run).kill()

        result = w5xde.train(
            f"{JOBS}:slow",
            nodes=2,
            steps=12,
            seconds=RUN_SECONDS_MAX,
            runs=str(tmp_path),
            callbacks=[AtStep({3: freeze_and_kill})],
        )
    assert result.summary["steps"] == 12
    # The nodes of the new fork server take the place of those of the old one.
    assert {node["name"] for node in result.summary["nodes"]} == {"local-1", "local-2"}
    assert any("was started again" in event.get("text", "") for event in events(result.folder))


def test_a_run_ends_with_a_word_if_it_stood_still_while_its_fork_server_died_and_a_node_is_frozen(
    tmp_path: Path,
) -> None:
    arguments = ["train", f"{JOBS}:slow", "--nodes", "2", "--epochs", "9999"]
    with command(*arguments, cwd=tmp_path) as run:
        run.wait_for("to join:")
        coordinator = psutil.Process(run.pid)
        (guard,) = coordinator.children()
        (server,) = guard.children()
        wait_until(lambda: len(server.children()) == 2 or run.poll() is not None, lambda: run.text)
        nodes = server.children()
        with frozen() as pids:
            pids.append(nodes[0].pid)
            nodes[0].suspend()
            coordinator.suspend()
            # The guard first, or it would start another fork server. The other node ends by itself.
            guard.kill()
            server.kill()
            assert psutil.wait_procs(nodes[1:], PATIENCE_SECONDS)[1] == []
            coordinator.resume()
            assert run.wait() == w5xde.TrainingError.exit_code
    assert "every local node has ended, because the process that starts them died" in run.text


AFTER_THREADS = f"""
import torch, w5xde
torch.set_num_threads(4)
torch.randn(700, 700) @ torch.randn(700, 700)
torch.randn(4_000_000).exp().sum()
result = w5xde.train({JOBS!r} + ":wide", nodes=2, threads=2, steps=6, seconds={RUN_SECONDS_MAX}, runs="runs")
print("steps", result.summary["steps"])
"""


def test_nodes_compute_with_threads_after_their_program_computed_with_threads(tmp_path: Path) -> None:
    """OpenMP's threads belong to the thread that used them, and a fork copies none of them."""
    done = run_python("-c", AFTER_THREADS, cwd=tmp_path)
    assert done.stdout.splitlines()[-1:] == ["steps 6"], done.stderr


def test_more_nodes_than_there_is_memory_for_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().children()
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2**30)
    with pytest.raises(w5xde.UsageError, match=r"1,000 local nodes need at least 9\.8 GiB") as refused:
        w5xde.train(f"{JOBS}:job", nodes=1000, runs=str(tmp_path))
    assert refused.value.code == "W5-304"
    assert "at most 102" in refused.value.fix
    assert list(tmp_path.iterdir()) == []
    assert psutil.Process().children() == before
