"""One cluster for most tests, and the weights that each of their runs must have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import w5xde
from tests.engines.ray.pool import JOB, RayPool, ray_pool

# A run of so many epochs lasts long enough to be disturbed.
EPOCHS = 20


@pytest.fixture(scope="session")
def sha256(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run of `EPOCHS` epochs in one process, by `jobs.job`, which only waits less."""
    runs = tmp_path_factory.mktemp("alone")
    result = w5xde.train(
        JOB.replace(":slow", ":job"),
        nodes=1,
        epochs=EPOCHS,
        batch_size=5,
        batches_per_step=8,
        runs=str(runs),
        progress=False,
    )
    return str(result.summary["weights_sha256"])


@pytest.fixture(scope="session")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool]:
    """A cluster whose head can be restarted, because it keeps what it knows on the disk."""
    storage = tmp_path_factory.mktemp("gcs")
    with ray_pool(4, RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=str(storage)) as pool:
        yield pool


@pytest.fixture
def pool(_cluster: RayPool) -> RayPool:
    """The cluster, with four hosts again."""
    _cluster.grow_to(4)
    return _cluster


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"
