"""The objects for Kubernetes, executed: a whole training whose pods are evicted and killed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.deploy.cluster import Cluster
from tests.deploy.jobs import OPEN, GatedJob
from tests.deploy.printed import IMAGE, documents, printed, typed_lines
from tests.deploy.run_files import TRAINING, audit, compare_with_one_process, step_of
from tests.processes import run_python
from tests.sockets import free_port

POOL, NODES, NAME = "w5xde-digits-pool", "w5xde-digits-nodes", "w5xde-digits"

# Whole trainings with restarts, on a machine with other work.
pytestmark = pytest.mark.timeout(400)


class Deployed:
    """A job, its objects and its Secret, made by the lines that a user types."""

    def __init__(self, folder: Path, *more: str, lifetime: str = "30d") -> None:
        self.folder = folder
        self.job = GatedJob(folder)
        choices = ["--name", "digits", "--image", IMAGE, "--port", str(free_port()), *more]
        text = printed("k8s", str(self.job.file), *choices, "--", *TRAINING)
        [line] = typed_lines(text, "w5xde ticket")
        assert "--lifetime 30d" in line
        done = run_python("-m", *shlex.split(line.replace("30d", lifetime)), cwd=folder)
        assert done.returncode == 0, done.stderr
        self.cluster = Cluster(folder / "cluster", documents(text), {NAME: folder / NAME})

    @property
    def run(self) -> Path:
        return self.cluster.claim(NAME) / "digits"

    def reach(self, step: int) -> None:
        """Let the run make so many steps, and wait until it has made them."""
        self.job.allow(step)
        self.cluster.wait_until(lambda: step_of(self.run) >= step, f"step {step}")

    def finish(self) -> None:
        """Let the run end: both Jobs are complete, and the weights are those of one process."""
        self.job.allow(OPEN)
        jobs = self.cluster.jobs
        self.cluster.wait_until(lambda: all(job.condition for job in jobs.values()), "the Jobs have ended")
        assert {job.condition for job in jobs.values()} == {"Complete"}, self.cluster.told("failed")
        for pod in self.cluster.pods:
            assert pod.container.members() == []
            assert "Read-only" not in pod.container.process.text, self.cluster.told("wrote elsewhere")
        compare_with_one_process(self.run, self.folder / "alone")
        audit(self.run)


def test_a_run_survives_evictions_and_kills_of_its_pods(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, "--nodes", "2")
    with deployed.cluster as cluster:
        pool, nodes = cluster.jobs[POOL], cluster.jobs[NODES]
        deployed.reach(20)
        # A node's machine is drained: the pod gives back its work, and another takes its place.
        evicted = nodes.active[0]
        evicted.evict()
        deployed.reach(40)
        cluster.wait_until(lambda: evicted.status is not None, "the evicted node ends")
        assert evicted.status == 75
        # The coordinator is killed, as for want of memory.
        [killed] = pool.active
        killed.container.process.kill()
        deployed.reach(70)
        assert killed.status == 137
        # And drained: it saves the run, and says that it is not over.
        [drained] = pool.active
        drained.evict()
        deployed.job.allow(80)
        cluster.wait_until(lambda: drained.status is not None, "the drained coordinator ends")
        assert drained.status == 75
        # A pod that starts when the run is over would look for it in vain.
        cluster.wait_until(
            lambda: (
                all("joined" in pod.container.process.text for pod in nodes.active) and len(nodes.active) == 2
            ),
            "both nodes are back",
        )
        deployed.finish()
        assert pool.verdicts[drained.name] == nodes.verdicts[evicted.name] == "Ignore"
        # Only the kill counts.
        assert pool.count("Count") == 1
        assert len(pool.pods) == 3


def test_after_its_deadline_a_run_goes_on_with_new_jobs(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, "--nodes", "1", "--deadline", "1h")
    with deployed.cluster as cluster:
        assert {job.spec["activeDeadlineSeconds"] for job in cluster.jobs.values()} == {3600}
        deployed.reach(20)
        for job in cluster.jobs.values():
            job.fail("DeadlineExceeded")
        deployed.job.allow(30)
        cluster.delete_jobs()
        assert [pod.status for pod in cluster.pods] == [75, 75]
        cluster.apply()
        deployed.finish()


def test_mistakes_of_the_user_fail_the_jobs_and_say_why(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, "--nodes", "1")
    words = [str(deployed.job.file), "--name", "digits", "--image", IMAGE, "--nodes", "1"]
    objects = documents(printed("k8s", *words))
    objects["ConfigMap", NAME]["data"]["train.py"] = "import nowhere\n"
    with Cluster(tmp_path / "broken", objects, {NAME: tmp_path / NAME}) as cluster:
        jobs = cluster.jobs
        cluster.wait_until(lambda: all(job.condition for job in jobs.values()), "the Jobs have ended")
        assert {job.condition for job in jobs.values()} == {"Failed: PodFailurePolicy"}
        for pod in cluster.pods:
            assert pod.status == 20, cluster.told("another end")
            assert "error[W5-" in pod.container.process.text
            assert "nowhere" in pod.container.process.text


def test_a_ticket_that_has_expired_before_the_first_start_fails_the_job_and_says_why(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, "--nodes", "1", lifetime="1s")
    with deployed.cluster as cluster:
        pool = cluster.jobs[POOL]
        cluster.wait_until(lambda: pool.condition is not None, "the coordinator's Job has ended")
        assert pool.condition == "Failed: PodFailurePolicy", cluster.told("another end")
        assert "error[W5-125]" in pool.pods[0].container.process.text
