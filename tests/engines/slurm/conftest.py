"""One Slurm for all tests: starting it takes a second, and each test leaves it idle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.slurm.rig import Slurm, running_slurm


@pytest.fixture(scope="session")
def running() -> Iterator[Slurm]:
    with running_slurm() as slurm:
        yield slurm


@pytest.fixture
def slurm(running: Slurm) -> Iterator[Slurm]:
    """The Slurm, with no job in it before and after the test."""
    running.wait_until_idle()
    try:
        yield running
    finally:
        running.run("scancel", "--state=PENDING", f"--user={running.user}")
        running.run("scancel", f"--user={running.user}")
        running.wait_for_no_process()
