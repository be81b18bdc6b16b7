"""How many nodes a machine runs: one for each GPU, else by its cores, and as many as memory has room for."""

from __future__ import annotations

import pytest

from w5xde.control.pool.machine_share import (
    ROOMY_BYTES,
    ROOMY_COPIES,
    SPARE_BYTES,
    Room,
    devices_of_nodes,
)

GIB = 2**30
GPUS = ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("devices", "cores", "threads", "count", "expected"),
    [
        (["cpu"], 8, 1, None, ["cpu"] * 8),
        (["cpu"], 8, 4, None, ["cpu"] * 2),
        (["cpu"], 8, 3, None, ["cpu"] * 2),
        (["cpu"], 2, 4, None, ["cpu"]),
        (["cpu"], 2, 1, 7, ["cpu"] * 7),
        (["cpu"], 2, 1, 0, []),
        (GPUS, 8, 1, None, GPUS),
        (GPUS, 8, 1, 3, ["cuda:0", "cuda:1", "cuda:0"]),
        ([*GPUS, "cpu"], 4, 1, None, [*GPUS, "cpu", "cpu"]),
        ([*GPUS, "cpu"], 1, 1, None, [*GPUS, "cpu"]),
    ],
)
def test_each_gpu_has_a_node_and_the_cpu_one_for_its_threads(devices, cores, threads, count, expected):
    assert devices_of_nodes(devices, cores, threads, count) == expected


def test_small_models_on_a_usual_machine_need_not_be_weighed():
    assert Room(4_000_000, 16 * GIB).is_ample(8)
    assert not Room(4_000_000, 16 * GIB).is_ample(64)
    assert not Room(GIB, 16 * GIB).is_ample(8)
    exact = Room(1000, 3 * (ROOMY_BYTES + 1000 * ROOMY_COPIES) + SPARE_BYTES)
    assert exact.is_ample(3)
    assert not exact.is_ample(4)


@pytest.mark.parametrize(("left", "nodes"), [(0, 1), (GIB, 1), (3 * GIB, 3), (7 * GIB, 6), (99 * GIB, 8)])
def test_as_many_nodes_follow_the_first_as_have_room(left: int, nodes: int):
    assert Room(0, left).nodes(8, node_bytes=GIB) == nodes


def test_a_node_that_takes_nothing_limits_nothing():
    assert Room(0, GIB).nodes(1000, node_bytes=0) == 1000
