"""The view of the core: all that the rest of the program may read of it. Only `handle` changes the core."""

from __future__ import annotations

from w5xde.control.pool.members import Members
from w5xde.control.run_state import RunState
from w5xde.control.step_decisions import StepDecisions
from w5xde.control.steps.cut import Accounts, Cut, Progress
from w5xde.control.steps.evaluation_schedule import HOLD
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Plan


class CoreView:
    """Reads the core as it is between two events."""

    __slots__ = ("_state", "_steps")

    def __init__(self, state: RunState, steps: StepDecisions) -> None:
        self._state = state
        self._steps = steps

    @property
    def version(self) -> int:
        """How many steps the core has decided; the learner may be a few behind."""
        return self._state.version

    @property
    def progress(self) -> Progress:
        return self._state.progress

    @property
    def round_steps(self) -> int:
        """The steps of the next round, if its epoch has as many left; 0 if this is not rounds mode."""
        lengths = self._state.plan.rounds
        return lengths.at(self._state.version) if lengths is not None else 0

    @property
    def accounts(self) -> Accounts:
        return self._state.accounts

    @property
    def plan(self) -> Plan:
        return self._state.plan

    @property
    def members(self) -> Members:
        return self._state.members

    @property
    def leases(self) -> Leases:
        """The outstanding leases, oldest first."""
        return self._state.leases

    @property
    def open_steps(self) -> list[OpenStep]:
        """Steps that are begun and not complete."""
        return self._state.mode.open_steps

    @property
    def batches_relent(self) -> int:
        return self._state.mode.batches_relent

    @property
    def has_started(self) -> bool:
        """Whether a lease was granted in this life of the coordinator."""
        return self._state.started_at is not None

    @property
    def holds_for_evaluations(self) -> bool:
        """Whether training waits for each evaluation, because its result decides how training goes on."""
        return self._state.settings.evaluation_policy == HOLD

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether no step begins until an evaluation has ended."""
        return self._state.evaluations.holds

    def lease(self, number: int) -> Lease | None:
        """The lease of this number, if it is outstanding."""
        return self._state.leases.get(number)

    def may_count(self, number: int, node: str) -> bool:
        """Whether an update of this node for this lease could still count, as far as is known now."""
        lease = self._state.leases.get(number)
        if lease is None or lease.node != node:
            return False
        # An answer that is held back for verification is compared even if another node was sooner.
        is_held_back = self._state.verification.holds_back(number)
        return is_held_back or not self._state.mode.admit(lease)

    def faults(self, node: str) -> int:
        """How many updates of this node were rejected while other nodes computed something else."""
        return self._state.norm_check.faults(node)

    def seconds(self, now: float) -> float:
        """How long training has gone on, in all lives of the coordinator."""
        return self._state.seconds(now)

    def cut(self, now: float) -> Cut:
        """What a checkpoint must hold of all that is decided so far."""
        return self._steps.cut(now)
