"""Validation in the simulator: what nodes measure is the version and the batch, so that a wrong one shows.

Fills the port of the pipeline for a validation set. While one is open, no step may be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.books import require
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.learn.data.payload import Packed, ReadBatch, UnreadableBatch
from w5xde.message_types import MetricRows, Value

if TYPE_CHECKING:
    from tests.sim.coordinator import SimulatedCoordinator

Key = tuple[int, int]


def measured(version: int, batch: int) -> list[float]:
    """What every honest node measures in a batch of the validation set."""
    return [float(version), float(batch)]


def is_true(lease: Lease, rows: MetricRows) -> bool:
    return rows == [measured(lease.version, batch) for batch in range(*lease.span)]


class ValidationBatches:
    """Batches of a validation set; reading one takes a while, and may fail."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self._coordinator = coordinator

    def at_once(self, keys: list[Key]) -> dict[Key, Packed] | None:
        return None

    def get(self, key: Key, done: Callable[[ReadBatch], None]) -> None:
        coordinator, (epoch, batch) = self._coordinator, key
        scenario = coordinator.world.scenario
        require(epoch < 0, f"batch {key} of the training is read as one of the validation set")
        read: ReadBatch = Packed(scenario.validation[batch], Value(None), [], 0)
        if coordinator.world.is_unreadable(key):
            read = UnreadableBatch("it is torn")
        coordinator.later(coordinator.rng.uniform(0, scenario.reading_seconds), done, read)

    def release(self, keys: list[Key]) -> None:
        raise AssertionError("no step is made of validation batches")


class FakeValidation:
    """Keeps what nodes measured, and checks it."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self.batches = ValidationBatches(coordinator)
        self._coordinator = coordinator
        self._rows: dict[int, list[float]] = {}
        # The version that is being validated.
        self.open_version: int | None = None

    def fits(self, rows: MetricRows) -> bool:
        return all(len(row) == 2 for row in rows)

    def began(self, lease: Lease) -> None:
        """A lease of a validation is granted."""
        if self.open_version is None:
            require(lease.version == self._coordinator.counter.version, f"{lease} of another version")
            self.open_version = lease.version
        require(lease.version == self.open_version, f"{lease} in the validation of {self.open_version}")

    def keep(self, lease: Lease, rows: MetricRows) -> None:
        require(is_true(lease, rows), f"{lease} was measured as {rows}")
        self._rows.update(zip(range(*lease.span), rows, strict=True))

    def conclude(self, effect: ev.Conclude) -> None:
        rows, self._rows = self._rows, {}
        coordinator = self._coordinator
        require(effect.step == coordinator.counter.version, f"{effect} after other steps")
        if not effect.failure:
            count = len(coordinator.world.scenario.validation)
            expected = {batch: measured(effect.step, batch) for batch in range(count)}
            require(rows == expected, f"{effect} with the numbers of batches {sorted(rows)}")
        self._end(effect.step)

    def measure_here(self, effect: ev.Evaluate) -> None:
        """The coordinator measures itself, because no node is there."""
        require(not len(self._coordinator.core.view.members), f"{effect}, although nodes are there")
        require(effect.step == self._coordinator.counter.version, f"{effect} of another version")
        self._rows.clear()
        self.open_version = effect.step
        self._end(effect.step)

    def _end(self, version: int) -> None:
        """The result is told after a while; until then no step is made."""
        coordinator = self._coordinator
        self.open_version = version

        def tell() -> None:
            require(coordinator.counter.version == version, f"steps were made before the result of {version}")
            self.open_version = None
            coordinator.world.validated.add(version)
            coordinator.tell(ev.Evaluated())

        coordinator.later(coordinator.rng.uniform(0, coordinator.world.scenario.learner_seconds), tell)
