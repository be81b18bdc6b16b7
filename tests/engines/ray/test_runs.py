"""Runs on a cluster: plain, interrupted, shown again by another driver, growing, and from Python."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.engines.ray.conftest import EPOCHS
from tests.engines.ray.pool import SHAPE, RayPool, RayRun, run_on
from tests.processes import command, run_python

LONG = ["--epochs", str(EPOCHS)]
AGAIN = ["--resume", "auto", *LONG]


def test_a_run_on_ray_has_the_weights_of_one_process(pool: RayPool, runs: Path, sha256: str) -> None:
    with run_on(pool, runs, *LONG, "--json") as run:
        result = run.require(sha256)
    assert len(result["nodes"]) == 2
    assert "every node has a place: 2 on 1 host" in run.driver.text
    assert "done  run mine" in run.driver.text
    # One object on stdout, as on one machine.
    assert json.loads(run.driver.text.splitlines()[-1])["weights_sha256"] == sha256


def test_an_interrupt_ends_the_run_in_order_and_the_same_command_goes_on(
    pool: RayPool, runs: Path, sha256: str
) -> None:
    with run_on(pool, runs, *AGAIN) as run:
        run.wait_for_step(5)
        run.driver.interrupt()
        assert run.wait() == 75
        assert "finishing what is begun; once more stops now" in run.driver.text
        assert "stopped  run mine" in run.driver.text
        run.require_nothing_left()
    with run_on(pool, runs, *AGAIN) as run:
        run.require(sha256)
        assert "life 2 of this run's coordinator" in run.driver.text
    with run_on(pool, runs, *AGAIN) as run:
        run.require(sha256)
        assert "run mine is complete: nothing is left to do" in run.driver.text


def test_two_interrupts_end_it_now(pool: RayPool, runs: Path) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        run.driver.send_signal(signal.SIGTERM)
        run.wait_for("once more stops now")
        run.driver.send_signal(signal.SIGTERM)
        assert run.wait() == 75
        run.require_nothing_left()


def test_a_run_outlives_its_driver_and_the_same_command_shows_it(
    pool: RayPool, runs: Path, sha256: str
) -> None:
    with run_on(pool, runs, *AGAIN) as first:
        first.wait_for_step(5)
        serving = first.coordinator()
        first.driver.kill()
        first.wait()
    with run_on(pool, runs, *AGAIN) as second:
        second.wait_for("run mine goes on, on this cluster: this command shows it")
        assert second.coordinator() == serving
        second.require(sha256)


def test_a_run_that_may_not_go_on_ends_with_its_driver(pool: RayPool, runs: Path) -> None:
    with run_on(pool, runs, *LONG) as run:
        run.wait_for_step(5)
        run.driver.kill()
        run.wait()
        run.require_nothing_left()


def test_nodes_beyond_the_minimum_come_with_hosts(pool: RayPool, runs: Path, sha256: str) -> None:
    pool.shrink_to(2)
    with run_on(pool, runs, *LONG, nodes="2..4") as run:
        run.wait_for("2 of 4 nodes have a place; the others wait for a host (1 CPUs)")
        assert len(run.nodes(2)) == 2
        pool.grow_to(4)
        run.nodes(4)
        result = run.require(sha256)
    assert sum(node["batches"] > 0 for node in result["nodes"]) == 4


PROGRAM = f"""
import w5xde
from tests.system.jobs import slow

job = slow

if __name__ == "__main__":
    shape = dict(epochs={EPOCHS}, batch_size=5, batches_per_step=8)
    result = w5xde.train(job, nodes=2, engine="ray", runs="runs", name="mine", **shape)
    print(result.is_over, result.summary["weights_sha256"])
    print(sum(parameter.numel() for parameter in result.model.parameters()))
"""


def test_from_python_it_is_one_argument(pool: RayPool, runs: Path, sha256: str) -> None:
    (runs.parent / "program.py").write_text(PROGRAM)
    done = run_python(
        "program.py",
        cwd=runs.parent,
        seconds_max=300,
        variables={"RAY_ADDRESS": pool.address, "PYTHONPATH": str(Path.cwd())},
    )
    assert f"True {sha256}" in done.stdout, done.stdout + done.stderr


def test_a_mistake_in_the_job_is_shown_at_the_driver(pool: RayPool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import nowhere\n")
    words = ["train", "train.py", "--engine", "ray", "--runs", str(tmp_path / "runs"), *SHAPE]
    with command(*words, is_fresh=True, cwd=tmp_path, RAY_ADDRESS=pool.address) as driver:
        run = RayRun(driver, tmp_path / "runs" / "none")
        assert run.wait() == 20
        assert "error[W5-208]: train.py cannot be loaded" in driver.text
        run.require_nothing_left()
