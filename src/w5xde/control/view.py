"""The view of the core: all that the rest of the program may read of it. Only `handle` changes the core."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from w5xde.control.steps.cut import Accounts, Cut, Progress
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan

if TYPE_CHECKING:
    from w5xde.control.coordinator import CoordinatorCore
    from w5xde.control.pool.members import Members
    from w5xde.control.steps.open_step import StepWork


class CoreView:
    """Reads the core as it is between two events."""

    __slots__ = ("_core",)

    def __init__(self, core: CoordinatorCore) -> None:
        self._core = core

    @property
    def version(self) -> int:
        """How many steps the core has decided; the learner may be a few behind."""
        return self._core.version

    @property
    def progress(self) -> Progress:
        return self._core.tally.progress

    @property
    def accounts(self) -> Accounts:
        return self._core.tally.accounts

    @property
    def plan(self) -> Plan:
        return self._core.plan

    @property
    def members(self) -> Members:
        return self._core.members

    @property
    def leases(self) -> Iterator[Lease]:
        """The outstanding leases, oldest first."""
        return iter(self._core.leases)

    @property
    def open_steps(self) -> list[StepWork]:
        """Steps that are begun and not complete."""
        return self._core.mode.open_works

    @property
    def batches_relent(self) -> int:
        return self._core.mode.batches_relent

    @property
    def has_started(self) -> bool:
        """Whether a lease was granted in this life of the coordinator."""
        return self._core.started_at is not None

    def lease(self, number: int) -> Lease | None:
        """The lease of this number, if it is outstanding."""
        return self._core.leases.get(number)

    def may_count(self, number: int, node: str) -> bool:
        """Whether an update of this node for this lease could still count, as far as is known now."""
        lease = self._core.leases.get(number)
        if lease is None or lease.node != node:
            return False
        # An answer that is held back for verification is compared even if another node was sooner.
        return self._core.verification.holds_back(number) or not self._core.mode.admit(lease, lease.version)

    def seconds(self, now: float) -> float:
        """How long training has gone on, in all lives of the coordinator."""
        return self._core.seconds(now)

    def cut(self, now: float) -> Cut:
        """What a checkpoint must hold of all that is decided so far."""
        return self._core.cut(now)
