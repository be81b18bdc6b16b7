"""The Ray cluster of a benchmark: the one that RAY_ADDRESS names, or several raylets on this machine.

A cluster that is started here has a head without room for workers, and hosts with room for one each. It is
stopped at the end, with all processes that it has started. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from w5xde.setting_sources import ENVIRONMENT_PREFIX, NO_SETTINGS

ADDRESS_VARIABLE = "RAY_ADDRESS"
# Where Ray keeps its logs and sockets, and the address of the cluster that a command finds by itself.
FOLDER_VARIABLE = "RAY_TMPDIR"
# Ray gives its workers a low priority, which the local pool beside them does not have.
CLUSTER_VARIABLES = {"RAY_worker_niceness": "0"}
# Little: nothing that is measured uses Ray's object store, and a machine has several.
STORE_BYTES = 80 * 2**20
# How long processes of a cluster may take to end by themselves when it is stopped.
END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that is running."""

    address: str
    is_ours: bool


@contextlib.contextmanager
def ray_cluster(hosts: int) -> Iterator[RayCluster]:
    """The user's cluster if there is one; else one with this many hosts, for as long as the block runs.

    The block has none of the user's own settings in its environment, which processes hand on.
    """
    address = os.environ.get(ADDRESS_VARIABLE)
    if address:
        with _environment({}):
            yield RayCluster(address, is_ours=False)
        return
    # Of its own, so that no other command on this machine takes it for the user's cluster.
    with (
        tempfile.TemporaryDirectory(prefix="w5xde-ray-", ignore_cleanup_errors=True) as folder,
        _environment({FOLDER_VARIABLE: folder, **CLUSTER_VARIABLES}),
        _started_cluster(hosts) as started,
    ):
        yield RayCluster(started, is_ours=True)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Take the user's own settings out of the environment, and add these variables."""
    before = dict(os.environ)
    for key in before:
        if key.startswith(ENVIRONMENT_PREFIX) and key not in NO_SETTINGS:
            del os.environ[key]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _started_cluster(hosts: int) -> Iterator[str]:
    """The address of a cluster on this machine."""
    from ray.cluster_utils import Cluster

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    cluster = None
    try:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(hosts):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        yield str(cluster.address)
    finally:
        started = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
        if cluster is not None:
            cluster.shutdown()
        _end(started)


def _end(processes: list[psutil.Process]) -> None:
    """Wait until these processes have ended; kill those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    for each in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(alive, timeout=END_SECONDS)
