"""What dies on a cluster is started again, and the run has the weights of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.engines.ray.conftest import EPOCHS
from tests.engines.ray.pool import RayPool, RayRun, actor_of, run_on, wait_until

LONG = ["--epochs", str(EPOCHS)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_for_another(run: RayRun, before: psutil.Process) -> psutil.Process:
    """The coordinator's process that follows one that was killed with its actor."""
    found = [before]

    def is_there() -> bool:
        found[0] = run.coordinator()
        return found[0].pid != before.pid

    wait_until(is_there, lambda: f"no other coordinator:\n{run.driver.text}")
    return found[0]


def coordinator_off_the_head(pool: RayPool, run: RayRun) -> psutil.Process:
    """The coordinator's process on a host that is not the head's: it may be placed anywhere."""
    serving = run.coordinator()
    while pool.host_of(serving) is pool.cluster.head_node:
        os.kill(actor_of(serving).pid, signal.SIGKILL)
        serving = wait_for_another(run, serving)
    return serving


def test_the_actor_of_a_node_is_killed(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        joined = run.nodes(2)
        os.kill(actor_of(joined[0]).pid, signal.SIGKILL)
        wait_until(lambda: is_gone(joined[0]), lambda: "the command outlives its actor")
        run.nodes(2)
        run.require(sha256)


def test_the_actor_of_the_coordinator_is_killed(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(15)
        serving = run.coordinator()
        os.kill(actor_of(serving).pid, signal.SIGKILL)
        wait_until(lambda: is_gone(serving), lambda: "the command outlives its actor")
        run.require(sha256)
        assert "life 2 of this run's coordinator" in run.driver.text


def test_the_command_of_the_coordinator_is_killed(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(15)
        run.coordinator().kill()
        run.require(sha256)
        assert "the coordinator's command ended (signal 9): it starts again" in run.driver.text


def test_the_raylet_of_a_node_is_killed(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        joined = run.nodes(2)[0]
        pool.kill_raylet(pool.host_of(joined), is_reaped=True)
        wait_until(lambda: is_gone(joined), lambda: "the command outlives its raylet")
        run.nodes(2)
        run.require(sha256)


def test_a_raylet_that_nobody_reaps_leaves_two_nodes_and_no_harm(
    pool: RayPool, runs: Path, sha256: str
) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        joined = run.nodes(2)[0]
        host = pool.host_of(joined)
        pool.kill_raylet(host, is_reaped=False)
        # Ray has started another in its place; the first may live on.
        run.nodes(3)
        assert run.wait() == 0
        host.all_processes["raylet"][0].process.wait()
        run.require(sha256)


def test_the_raylet_of_the_coordinator_is_killed(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        serving = coordinator_off_the_head(pool, run)
        run.wait_for_step(15)
        pool.kill_raylet(pool.host_of(serving), is_reaped=True)
        wait_until(lambda: is_gone(serving), lambda: "the command outlives its raylet")
        run.require(sha256)


def test_the_head_forgets_nothing_with_storage(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        serving = run.coordinator()
        pool.cluster.head_node.kill_gcs_server()
        pool.cluster.head_node.start_gcs_server()
        run.require(sha256)
        assert "life 2" not in run.driver.text
        assert is_gone(serving)


def test_a_warning_of_a_preemption_becomes_a_polite_goodbye(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        joined = run.nodes(2)[0]
        drained = pool.host_of(joined)
        pool.drain(drained)
        run.wait_for("left")
        pool.hosts.remove(drained)
        # It is started again on a host that stays.
        wait_until(lambda: is_gone(joined), lambda: "the node stays")
        run.nodes(2)
        run.require(sha256)
