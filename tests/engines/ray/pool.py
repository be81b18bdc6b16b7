"""A real Ray cluster on this machine, runs on it, and the processes of both, to be killed.

Processes are found by their place in the tree: a raylet starts the workers in which actors live, and these
start `w5xde serve` and `w5xde join`. No test connects to the cluster itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster

from tests.processes import JOBS, LOOK_SECONDS, Process, command, whole_lines
from w5xde.runtime.durable.audit import audit_run

# A busy machine may take a minute to start an actor elsewhere, its command and torch.
PATIENCE_SECONDS = 300.0
BATCH_SECONDS = "0.04"
# Sixteen batches a step of five samples, so that a step takes as long with three nodes as with four.
SHAPE = ["--batch-size", "5", "--batches-per-step", "8", "--checkpoint-every", "10steps"]
JOB = f"{JOBS}:slow"
# As verified: a host that is killed is noticed within two seconds, not seventeen.
NOTICED_SOON = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
}
HOST = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """As that of `tests.processes`, with the patience that a cluster needs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(5 * LOOK_SECONDS)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return list(process.cmdline())
    return []


def commands_of(runs: Path) -> list[psutil.Process]:
    """All processes of `w5xde serve` and `w5xde join` that work for runs in this folder."""
    return [
        each
        for each in psutil.process_iter()
        if _is_alive(each) and "w5xde" in (words := _words(each)) and any(str(runs) in word for word in words)
    ]


@dataclass
class RayPool:
    """A cluster: a head without room for nodes, and hosts with room for one each."""

    cluster: Cluster
    hosts: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_host(self) -> Any:
        host = self.cluster.add_node(**HOST)
        self.hosts.append(host)
        return host

    def grow_to(self, count: int) -> None:
        self.hosts = [host for host in self.hosts if _is_alive(raylet_of(host))]
        while len(self.hosts) < count:
            self.add_host()

    def shrink_to(self, count: int) -> None:
        """Take hosts away, which nobody needs."""
        self.grow_to(0)
        while len(self.hosts) > count:
            self.cluster.remove_node(self.hosts.pop())

    def host_of(self, process: psutil.Process) -> Any:
        """The host on which a process runs."""
        above = {each.pid for each in process.parents()}
        every = [self.cluster.head_node, *self.hosts]
        return next(host for host in every if raylet_of(host).pid in above)

    def kill_raylet(self, host: Any, *, is_reaped: bool) -> None:
        """Kill a raylet. One that nobody waits for stays a zombie, which its workers take for alive."""
        raylet = _raylet(host)
        os.kill(raylet.pid, signal.SIGKILL)
        if is_reaped:
            raylet.wait()
        self.hosts.remove(host)

    def drain(self, host: Any) -> None:
        """Warn of a preemption, as clouds do."""
        words = ["drain-node", "--address", self.address, "--node-id", host.node_id]
        words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        words += ["--deadline-remaining-seconds", "60"]
        ray = str(Path(sys.executable).parent / "ray")
        subprocess.run([ray, *words], check=True, capture_output=True, timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self.cluster.shutdown()


def _raylet(host: Any) -> subprocess.Popen[bytes]:
    found: subprocess.Popen[bytes] = host.all_processes["raylet"][0].process
    return found


def raylet_of(host: Any) -> psutil.Process:
    return psutil.Process(_raylet(host).pid)


@contextmanager
def ray_pool(count: int, **variables: str) -> Iterator[RayPool]:
    """A cluster with so many hosts; the variables are those of all its processes."""
    wanted = NOTICED_SOON | {"TEST_BATCH_SECONDS": BATCH_SECONDS} | variables
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": HOST["object_store_memory"]}
        pool = RayPool(Cluster(initialize_head=True, head_node_args=head))
        try:
            pool.grow_to(count)
            yield pool
        finally:
            pool.close()
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


# --- a run ----------------------------------------------------------------------------------------


@dataclass
class RayRun:
    """A run on a cluster, and its driver."""

    driver: Process
    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder.parent

    def step(self) -> int:
        lines = whole_lines(self.folder / "metrics.jsonl")
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            status = self.driver.poll()
            assert status in (None, 0), self.driver.text
            return self.step() >= step

        wait_until(is_there, lambda: f"still at step {self.step()}:\n{self.driver.text}")

    def wait_for(self, text: str) -> None:
        """Wait until the driver has said something."""

        def is_said() -> bool:
            has_ended = self.driver.poll() is not None
            assert text in self.driver.text or not has_ended, f"no {text!r} in:\n{self.driver.text}"
            return text in self.driver.text

        wait_until(is_said, lambda: f"no {text!r} in:\n{self.driver.text}")

    def wait(self) -> int:
        """Wait for the driver's end; return its exit code."""
        wait_until(lambda: self.driver.poll() is not None, lambda: f"no end:\n{self.driver.text}")
        return self.driver.wait()

    def coordinator(self) -> psutil.Process:
        """The process of `w5xde serve`."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = [each for each in commands_of(self.runs) if "serve" in _words(each)]
            return bool(found)

        wait_until(is_there, lambda: f"no coordinator:\n{self.driver.text}")
        return found[0]

    def nodes(self, count: int) -> list[psutil.Process]:
        """The processes of `w5xde join`, once there are so many."""
        found: list[psutil.Process] = []

        def are_there() -> bool:
            every = [each for each in commands_of(self.runs) if "join" in _words(each)]
            # A node may have processes of its own.
            found[:] = [each for each in every if each.parent() not in every]
            return len(found) >= count

        wait_until(are_there, lambda: f"{len(found)} of {count} nodes:\n{self.driver.text}")
        return found

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())["result"]
        return found

    def require(self, sha256: str) -> dict[str, Any]:
        """The run has ended well: with these weights, a clean audit, and no process of it left."""
        assert self.wait() == 0, self.driver.text
        result = self.result()
        assert result["weights_sha256"] == sha256, self.driver.text
        report = audit_run(self.folder)
        assert report.summary()["clean"], report.summary()
        self.require_nothing_left()
        return result

    def require_nothing_left(self) -> None:
        wait_until(
            lambda: not commands_of(self.runs), lambda: str([_words(each) for each in commands_of(self.runs)])
        )


def actor_of(process: psutil.Process) -> psutil.Process:
    """The worker process in which the actor lives that minds a command."""
    found = process.parent()
    assert found is not None
    return found


@contextmanager
def run_on(pool: RayPool, runs: Path, *flags: str, name: str = "mine", nodes: str = "2") -> Iterator[RayRun]:
    """Start `w5xde train --engine ray` as a person would."""
    words = ["train", JOB, "--engine", "ray", "--nodes", nodes, "--runs", str(runs), "--name", name]
    with command(*words, *SHAPE, *flags, is_fresh=True, cwd=runs.parent, RAY_ADDRESS=pool.address) as driver:
        yield RayRun(driver, runs / name)
