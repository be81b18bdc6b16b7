"""Runs on a real Slurm: whatever it does to their jobs, they end with the weights of one process."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.engines.slurm.deployed import DeployedRun
from tests.engines.slurm.rig import Slurm

# Slurm counts time limits in minutes, and needs half a minute to see that a host is gone.
pytestmark = pytest.mark.timeout(300)

QUEUED_AGAIN = "stopped before the run was over; queued again"


def test_an_array_trains_and_every_job_ends(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "3", "--at-most", "2")
    run.submit()
    run.wait_until_joined(1, 2)
    assert slurm.state(run.element(3)) == "PENDING"
    run.finish()
    assert {slurm.wait_for_end(run.element(number)) for number in (1, 2)} == {"COMPLETED"}
    # It is taken out of the queue; or it starts when the others end, and finds that the run is over.
    assert slurm.wait_for_end(run.element(3)) in ("COMPLETED", "CANCELLED")


def test_a_preempted_node_is_queued_again_although_it_ends_in_time(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "2")
    run.submit()
    run.wait_until_joined(1, 2)
    # This element has the number of the whole array as its own.
    last = run.element(2)
    assert slurm.facts(last)["JobId"] == run.nodes
    with slurm.preempting(last):
        run.wait_for(last, QUEUED_AGAIN)
    slurm.hurry(last)
    run.wait_until_joined(2, times=2)
    assert run.log(last).count(f"as slurm-{last}") == 2
    assert slurm.facts(run.element(1))["Restarts"] == "0"
    run.finish()
    assert "life 2" not in run.log(run.pool)


def test_a_preempted_coordinator_goes_on_where_it_stopped(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "1", "--partition", "preempt")
    run.submit()
    run.wait_for_step(2)
    with slurm.preempting(run.pool):
        # It sends its nodes away, which are queued again too.
        for job in (run.pool, run.element(1)):
            run.wait_for(job, QUEUED_AGAIN)
    for job in (run.pool, run.element(1)):
        slurm.hurry(job)
    run.finish()
    assert "life 2 of this run's coordinator" in run.log(run.pool)


def test_jobs_go_on_after_their_time_limit(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "1", "--time", "1", "--warning", "30")
    run.submit()
    for job in (run.pool, run.element(1)):
        run.wait_for(job, QUEUED_AGAIN)
        # One limit is enough to see, and on a busy machine a minute may be too short to train at all.
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    for job in (run.pool, run.element(1)):
        slurm.hurry(job)
    run.finish()


def test_what_scancel_ends_stays_cancelled_until_it_is_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "2")
    run.submit()
    run.wait_until_joined(1, 2)
    run.wait_for_step(1)
    cancelled = [run.element(1), run.element(2), run.pool]
    slurm.run("scancel", run.element(1))
    assert slurm.wait_for_end(run.element(1)) == "CANCELLED"
    slurm.run("scancel", run.nodes, run.pool)
    slurm.wait_for_no_process()
    assert "Slurm ended this job" in run.log(run.pool)
    for job in cancelled:
        assert (slurm.wait_for_end(job), slurm.facts(job)["Restarts"]) == ("CANCELLED", "0")
    run.submit()
    run.finish()
    assert [slurm.state(job) for job in cancelled] == ["CANCELLED"] * 3
    assert "life 2 of this run's coordinator" in run.log(run.pool)


def test_the_coordinator_moves_to_another_host_when_its_host_dies(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "1")
    run.submit()
    run.wait_until_joined(1)
    run.wait_for_step(6)
    host = slurm.facts(run.pool)["NodeList"]
    slurm.kill_host(host)
    try:
        slurm.hurry(run.pool)
        assert slurm.facts(run.pool)["NodeList"] != host
        run.wait_until_joined(1, times=2)
        run.finish()
        assert slurm.facts(run.element(1))["Restarts"] == "0", f"{run.logs()}\n{slurm.logs()}"
    finally:
        slurm.start_host(host)


def test_killed_processes_are_started_again(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes", "1")
    run.submit()
    run.wait_until_joined(1)
    for command, job in (("join", run.element(1)), ("serve", run.pool)):
        for process in _commands(slurm, command):
            process.send_signal(signal.SIGKILL)
        run.wait_for(job, "killed by signal 9; queued again")
        slurm.hurry(job)
    run.finish()


def _commands(slurm: Slurm, name: str) -> list[psutil.Process]:
    """The processes that Slurm started for a command of w5xde."""
    return [each for each in slurm.processes() if each.cmdline()[2:3] == [name]]


def test_an_unknown_partition_is_slurms_own_error_and_leaves_no_job(slurm: Slurm, tmp_path: Path) -> None:
    run = DeployedRun(slurm, tmp_path, "--nodes-partition", "nowhere")
    with pytest.raises(AssertionError, match="invalid partition specified: nowhere"):
        run.submit()
    slurm.wait_for_no_process()
    assert "w5-mine" not in slurm.run("squeue", "--format=%j")
