"""A head that is lost: with what it forgets, and with all that it had. The same command goes on elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.engines.ray.conftest import EPOCHS
from tests.engines.ray.pool import ray_pool, run_on

AGAIN = ["--resume", "auto", "--epochs", str(EPOCHS)]


def test_a_run_that_its_cluster_has_forgotten_ends_itself_and_goes_on_later(runs: Path, sha256: str) -> None:
    with ray_pool(2) as pool, run_on(pool, runs, *AGAIN) as run:
        run.wait_for_step(15)
        pool.cluster.head_node.kill_gcs_server()
        pool.cluster.head_node.start_gcs_server()
        assert run.wait() == 75, run.driver.text
        assert "error[W5-606]: the cluster no longer minds this run" in run.driver.text
        assert "its head was restarted without storage" in run.driver.text
        run.require_nothing_left()
        step = run.step()
    with ray_pool(2) as pool, run_on(pool, runs, *AGAIN) as run:
        run.require(sha256)
        # It ended in order: no step is made again.
        assert f"goes on from step {step}" in run.driver.text


def test_the_head_and_the_hosts_die_and_the_same_command_goes_on_with_another_cluster(
    runs: Path, sha256: str
) -> None:
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20"}
    with ray_pool(2, **limit) as pool, run_on(pool, runs, *AGAIN) as run:
        run.wait_for_step(15)
        pool.cluster.head_node.kill_gcs_server()
        pool.cluster.head_node.kill_raylet()
        assert run.wait() == 75, run.driver.text
        assert "error[W5-606]: the cluster no longer minds this run" in run.driver.text
        run.require_nothing_left()
    with ray_pool(2) as pool, run_on(pool, runs, *AGAIN) as run:
        run.require(sha256)
