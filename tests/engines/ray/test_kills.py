"""Twenty kills, drawn at random, of everything that a run on a cluster is made of."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import w5xde
from tests.engines.ray.pool import JOB, RayPool, RayRun, actor_of, run_on
from w5xde.runtime.durable.audit import audit_run

KILLS = 20
SEED = 15
KINDS = ["node", "node host", "coordinator", "coordinator command", "coordinator host", "head"]


def kill(kind: str, pool: RayPool, run: RayRun, choice: random.Random) -> None:
    """Kill a part of the run or of its cluster; a host is replaced by another one."""
    if kind == "head":
        pool.cluster.head_node.kill_gcs_server()
        pool.cluster.head_node.start_gcs_server()
        return
    target = run.coordinator() if kind.startswith("coordinator") else choice.choice(run.nodes(2))
    if kind.endswith("host") and pool.host_of(target) is not pool.cluster.head_node:
        pool.kill_raylet(pool.host_of(target), is_reaped=True)
        pool.add_host()
    elif kind.endswith("command"):
        target.kill()
    else:
        os.kill(actor_of(target).pid, signal.SIGKILL)


@pytest.mark.timeout(1500)
def test_twenty_kills_leave_the_weights_of_one_process(pool: RayPool, runs: Path) -> None:
    choice, step = random.Random(SEED), 3
    with run_on(pool, runs, "--epochs", "99999", nodes="3") as run:
        for number in range(KILLS):
            run.wait_for_step(step)
            kind = choice.choice(KINDS)
            print(f"kill {number}: {kind} at step {run.step()}")
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                kill(kind, pool, run, choice)
            # It goes on, if only from its last checkpoint.
            step = run.step() + 2
        run.wait_for_step(step)
        run.driver.interrupt()
        assert run.wait() == 75, run.driver.text
        run.require_nothing_left()
        result = run.result()
    assert audit_run(run.folder).summary()["clean"]
    alone = w5xde.train(
        JOB.replace(":slow", ":job"),
        nodes=1,
        steps=result["steps"],
        batch_size=5,
        batches_per_step=8,
        runs=str(runs.parent / "alone"),
        progress=False,
    )
    assert alone.summary["weights_sha256"] == result["weights_sha256"]
