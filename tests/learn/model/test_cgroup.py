"""Limits of containers and services: the narrowest of all groups of a process counts, in both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from w5xde.learn.model import cgroup
from w5xde.learn.model.device import core_count


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without groups, whose files a test writes."""
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "OWN_GROUPS", tmp_path / "own")
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_a_system_without_groups_has_no_limits(groups: Path) -> None:
    assert cgroup.cpu_quota() is None
    assert cgroup.memory_left() is None


def test_the_narrowest_group_of_version_two_counts(groups: Path) -> None:
    write(
        groups,
        {
            "own": "0::/service/inner",
            "cgroup/cgroup.controllers": "cpu memory",
            "cgroup/service/inner/cpu.max": "max 100000",
            "cgroup/service/cpu.max": "150000 100000",
            "cgroup/cpu.max": "400000 100000",
            "cgroup/service/memory.max": "1000",
            "cgroup/service/memory.current": "900",
            "cgroup/service/memory.stat": "anon 600\nfile 300\ninactive_file 250\nactive_file 50",
            "cgroup/service/inner/memory.max": "max",
            "cgroup/service/inner/memory.current": "10",
        },
    )
    assert cgroup.cpu_quota() == 1.5
    # Files that are only kept in memory until it is needed are not in the way.
    assert cgroup.memory_left() == 1000 - 900 + 250


def test_a_container_of_version_one_has_its_own_group_at_the_root(groups: Path) -> None:
    """It sees the host's path of its group, which is not mounted inside."""
    write(
        groups,
        {
            "own": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
            "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000",
            "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "cgroup/memory/memory.limit_in_bytes": "5000",
            "cgroup/memory/memory.usage_in_bytes": "6000",
        },
    )
    assert cgroup.cpu_quota() == 2.0
    assert cgroup.memory_left() == 0


@pytest.mark.parametrize("text", ["", "max", "-1", "nonsense 100000", "100000 0", "1 2 3"])
def test_what_is_no_limit_limits_nothing(groups: Path, text: str) -> None:
    write(groups, {"own": "0::/", "cgroup/cgroup.controllers": "", "cgroup/cpu.max": text})
    assert cgroup.cpu_quota() is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (20.0, 8), (3.0, 3), (1.2, 2), (0.2, 1)])
def test_a_quota_limits_the_cores_and_a_part_of_one_counts(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: quota)
    assert core_count() == cores
