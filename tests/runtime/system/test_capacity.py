"""The nodes of this machine: devices are found without starting their drivers here, and nodes are weighed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from w5xde.errors import UsageError
from w5xde.runtime.system import capacity, devices, memory
from w5xde.runtime.system.capacity import NodePlan, little_memory_text, plan_nodes
from w5xde.runtime.system.machine import machine_name

MIB = 2**20


# --- devices --------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A machine with two GPUs, and the processes that looked for them."""
    lookers: list[int] = []

    def look() -> bool:
        lookers.append(os.getpid())
        return True

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", look)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", look)
    yield lookers
    assert lookers == [], "the driver was started in this process, so its forks could not use it"


def test_every_gpu_is_found_without_starting_its_driver_here(two_gpus: list[int]) -> None:
    assert devices.machine_devices("auto") == ["cuda:0", "cuda:1"]
    assert devices.machine_devices("cuda:1") == ["cuda:1"]
    assert devices.machine_devices("cuda:0, cpu") == ["cuda:0", "cpu"]


def test_a_gpu_that_is_not_there_is_refused_here_although_a_fork_looked(two_gpus: list[int]) -> None:
    with pytest.raises(UsageError, match=r"--devices cuda:2: this machine has 2") as refused:
        devices.machine_devices("cuda:0,cuda:2")
    assert refused.value.code == "W5-301"


def test_a_machine_without_gpus_computes_on_its_cpu() -> None:
    assert devices.machine_devices("auto") == ["cpu"]
    assert devices.machine_devices("cpu") == ["cpu"]
    with pytest.raises(UsageError, match="--devices cuda was asked for"):
        devices.machine_devices("cpu,cuda")


def test_a_search_that_crashes_is_told() -> None:
    def crash() -> list[str]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    with pytest.raises(UsageError, match="torch cannot look for the devices"):
        devices.in_child(crash)


# --- memory ---------------------------------------------------------------------------------------


def child(work: Callable[[], object]) -> int:
    """A fork that has done some work, and then waits."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        work()
        os.write(writing, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    return pid


def grown_by(work: Callable[[], object]) -> int:
    pid = child(work)
    try:
        return memory.grown_bytes(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_node_is_weighed_by_the_most_that_it_took_without_what_it_shares() -> None:
    idle = grown_by(lambda: None)
    assert idle < 40 * MIB

    def compute() -> None:
        block = bytearray(200 * MIB)
        del block

    assert 190 * MIB < grown_by(compute) - idle < 240 * MIB


def test_where_the_system_tells_no_sizes_resident_memory_stands_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_status", lambda pid: {})
    assert memory.grown_bytes(os.getpid()) > 50 * MIB


def test_a_process_that_is_gone_weighs_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert memory.grown_bytes(pid) == 0


def test_as_many_nodes_as_fit_but_only_if_their_number_is_ours_to_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2 * 2**30)
    monkeypatch.setattr(capacity, "grown_bytes", lambda pid: 300 * MIB)
    plan = NodePlan(["cpu"] * 8, is_auto=True)
    assert plan.fitting(1000, None) is None
    assert plan.fitting(1000, 1234) == 5
    assert NodePlan(["cpu"] * 8).fitting(1000, None) == 8
    monkeypatch.setattr(capacity, "available_bytes", lambda: 64 * 2**30)
    assert plan.fitting(1000, None) == 8
    assert little_memory_text(5, plan) == (
        "memory has room for 5 nodes here, and there are cores for 8; --nodes N starts N all the same"
    )


def test_the_cores_of_this_machine_decide_unless_the_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "core_count", lambda: 8)
    assert plan_nodes(["cpu"], 1, None) == NodePlan(["cpu"] * 8, is_auto=True)
    assert plan_nodes(["cpu"], 4, None) == NodePlan(["cpu"] * 2, is_auto=True)
    assert plan_nodes(["cpu"], 4, 3) == NodePlan(["cpu"] * 3)


def test_containers_with_cores_of_their_own_are_machines_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from w5xde.learn.model import cgroup

    whole = machine_name()
    monkeypatch.setattr(cgroup, "namespace", lambda: "cgroup:[1]")
    assert machine_name() == whole
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 2.0)
    one = machine_name()
    monkeypatch.setattr(cgroup, "namespace", lambda: "cgroup:[2]")
    assert len({whole, one, machine_name()}) == 3
