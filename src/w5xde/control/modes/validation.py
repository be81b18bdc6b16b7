"""Validation: lends the batches of a validation set, all on one version, beside the mode of the run.

A validation is *wanted* when it is due, *open* once every step that was decided is applied, and *under way*
until its result is known. No step is applied meanwhile: steps that are complete are put off. So the version
stays what it is, and a batch that is lent again is measured on the same weights. Only decides: knows no
tensors, no metrics, no sockets and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from w5xde.control.modes.base import Mode
from w5xde.control.modes.sync import SyncMode
from w5xde.control.pool.members import Member
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import validation_plan

# A lease has at most this many batches: enough to hide a round trip, and little to measure again.
LEASE_BATCHES_MAX = 8


class Validation(SyncMode):
    """The validation of one run. Its batches are lent by speed, as those of a step are in sync mode."""

    def __init__(self, mode: Mode, sizes: tuple[int, ...]) -> None:
        """`sizes`: the number of samples in each batch; none: nothing is lent for evaluations."""
        super().__init__(mode.plan, mode.members, mode.leases)
        self._sizes = sizes
        self._is_wanted = False
        self._is_measured = False
        self._is_here = False
        # The version that was validated last, or could not be.
        self._version = -1
        # Whether the run ends with it.
        self.is_last = False

    @property
    def is_on(self) -> bool:
        return bool(self._sizes)

    @property
    def is_under_way(self) -> bool:
        return self._is_wanted or bool(self.open_steps) or self._is_measured

    @property
    def is_waiting(self) -> bool:
        """Whether batches are still to be measured."""
        return self._is_wanted or bool(self.open_steps)

    @property
    def comes_first(self) -> bool:
        """Whether no work for a step is lent now: a node is to measure first, or the coordinator measures."""
        has_free = any(step.free for step in self.open_steps)
        return self._is_wanted or has_free or self._is_here or (self.is_last and self.is_under_way)

    def want(self, *, is_last: bool = False) -> None:
        """A validation of the newest version is due."""
        self._is_wanted = True
        self.is_last |= is_last

    def is_done_for(self, version: int) -> bool:
        """Whether this version was validated, or could not be."""
        return self._version == version

    def open_if_ready(self, version: int, *, is_applied: bool) -> None:
        """Open a validation that is wanted, if every step that was decided is applied."""
        if self._is_wanted and is_applied:
            self._is_wanted, self._version = False, version
            self.reopen(OpenStep(validation_plan(version, self._sizes)))

    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        return super().grants(candidates, version, now) if self.open_steps else []

    def take(self, lease: Lease) -> OpenStep | None:
        complete = super().take(lease)
        if complete is not None:
            self._is_measured = True
            self.stepped(complete.plan.index)
        return complete

    def restart(self) -> None:
        """Lend all batches of an open validation again."""
        self.reopen(OpenStep(validation_plan(self._version, self._sizes)))

    def give_up(self) -> int:
        """Measure nothing more of an open validation; returns the number of its step, whose leases end."""
        index = self.open_steps[0].plan.index
        self._close_step()
        return index

    def take_over(self, version: int) -> None:
        """The coordinator measures this version itself. No batch is lent."""
        self._version, self._is_wanted, self._is_here = version, False, True
        self._close_step()

    def _close_step(self) -> None:
        self._is_measured = True
        for open_step in self.open_steps:
            self._completed(open_step)
            self.stepped(open_step.plan.index)

    def close(self) -> None:
        """The result is known, or there is none."""
        self._is_measured = self._is_here = False

    @staticmethod
    def _batches_to_lend(member: Member, finish_seconds: float, now: float) -> int:
        return min(LEASE_BATCHES_MAX, SyncMode._batches_to_lend(member, finish_seconds, now))
