"""What cannot work on a cluster is refused before anything is placed, with a code and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.ray.pool import JOB, RayPool
from tests.processes import command

RAY = ["train", JOB, "--engine", "ray"]


def refused(words: list[str], address: str, folder: Path) -> tuple[int, str]:
    with command(*words, is_fresh=True, cwd=folder, RAY_ADDRESS=address) as driver:
        return driver.wait(), driver.text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "ray://127.0.0.1:10001"])
def test_an_address_without_a_cluster(address: str, tmp_path: Path) -> None:
    status, told = refused(RAY, address, tmp_path)
    assert status == 2
    assert "error[W5-601]" in told
    assert "ray start --head" in told or "ray job submit" in told


def test_a_folder_of_runs_that_hosts_do_not_see(pool: RayPool, tmp_path: Path) -> None:
    # Every process has another folder there.
    status, told = refused([*RAY, "--runs", "/proc/self/cwd/runs"], pool.address, tmp_path)
    assert status == 40
    assert "error[W5-602]" in told
    assert "storage that all hosts share" in told
    assert not any((tmp_path / "runs").iterdir())


def test_a_job_that_hosts_do_not_have(pool: RayPool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["train", "/proc/self/cwd/train.py", "--engine", "ray", "--runs", str(tmp_path / "runs")]
    status, told = refused(words, pool.address, tmp_path)
    assert status == 2
    assert "error[W5-603]" in told


def test_more_cores_than_any_host_has(pool: RayPool, tmp_path: Path) -> None:
    words = [*RAY, "--runs", str(tmp_path), "--cpus-per-node", "64"]
    status, told = refused(words, pool.address, tmp_path)
    assert status == 2
    assert "error[W5-605]: no host of the cluster has what a node needs (64 CPUs)" in told
    assert "--nodes 0..8" in told


def test_a_label_that_no_host_has(pool: RayPool, tmp_path: Path) -> None:
    words = [*RAY, "--runs", str(tmp_path), "--labels", "ray.io/market-type=spot"]
    status, told = refused(words, pool.address, tmp_path)
    assert status == 2
    assert "error[W5-605]" in told
    assert "ray.io/market-type=spot" in told


def test_a_host_without_w5xde(pool: RayPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules" / "w5xde").mkdir(parents=True)
    (tmp_path / "modules" / "w5xde" / "__init__.py").touch()
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path / "modules"))
        host = pool.add_host()
    try:
        status, told = refused([*RAY, "--runs", str(tmp_path / "runs")], pool.address, tmp_path)
    finally:
        pool.hosts.remove(host)
        pool.cluster.remove_node(host)
    assert status == 2
    assert "error[W5-604]" in told
    assert "No module named 'w5xde.engines'" in told
