"""What every mode decides: who is lent which batches next, what is admitted, and when a step is complete.

Modes only decide: they touch no tensors, no sockets and no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep, Share
from w5xde.control.steps.plan import Plan
from w5xde.tree import Span


class Mode(ABC):
    """What both modes share: the pool, the plan, and writing a lease down."""

    def __init__(self, plan: Plan, members: Members, leases: Leases) -> None:
        self.plan = plan
        self.members = members
        self.leases = leases
        self.batches_relent = 0
        # Set when the run is asked to stop: what is begun is finished, nothing new is begun.
        self.is_closing = False

    @abstractmethod
    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        """New leases for these members, already recorded; each list travels as one message."""

    @abstractmethod
    def admit(self, lease: Lease, version: int) -> str:
        """Why the answer to a lease must be refused, or nothing."""

    @abstractmethod
    def take(self, lease: Lease) -> OpenStep | None:
        """Count an admitted answer; returns the step's work if that completed it."""

    def is_stale(self, work: OpenStep, version: int) -> bool:
        """Whether a complete step must begin anew, because parts of it are too old by now."""
        return False

    @abstractmethod
    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        """Go on without these batches; returns the step's work if that completed it."""

    @abstractmethod
    def give_back(self, lease: Lease, *, failed: bool = False) -> OpenStep | None:
        """The lease ended without an answer: its batches must be lent again. Returns their step's work."""

    @abstractmethod
    def stepped(self, step: int) -> Iterable[Member]:
        """The learner has applied a complete step; returns who may be waiting for that."""

    @abstractmethod
    def reopen(self, work: OpenStep) -> None:
        """A complete step changed nothing: what of it is free is to be lent again."""

    @abstractmethod
    def overtake(self, now: float) -> None:
        """Look for leases that are so late that somebody else should compute them too."""

    @abstractmethod
    def loaded(self, machine: str, load: float) -> None:
        """The coordinator needs this share of a core there."""

    @property
    @abstractmethod
    def open_works(self) -> list[OpenStep]:
        """Steps that are begun and not complete."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether nothing is left to do for what was begun."""

    def lend(self, member: Member, work: OpenStep, span: Span, version: int, now: float) -> Lease:
        number = self.leases.new_id()
        expected_at = self.members.lend(member, number, span.count, now)
        lease = Lease(number, member.name, work.plan, span, version, now, expected_at)
        self.leases.grant(lease)
        if any(back.holds(span) for back in work.returned):
            self.batches_relent += span.count
        return lease


def share_of(lease: Lease) -> Share:
    return lease.span.start, lease.span.stop, lease.node, lease.id
