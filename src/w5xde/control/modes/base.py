"""What every mode decides: the batches that a node is lent, the answers that count, and the end of a step.

Modes only decide: they know no tensors, no sockets and no clock. Callers pass `now`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep, Share
from w5xde.control.steps.plan import Plan
from w5xde.tree import Span

# Why the second answer to a span of batches is rejected: nothing is wrong with it.
SOONER = "somebody else was sooner"


class Mode(ABC):
    """A mode of training. It has the pool, the plan and the leases, and records each lease that it grants."""

    def __init__(self, plan: Plan, members: Members, leases: Leases) -> None:
        self.plan = plan
        self.members = members
        self.leases = leases
        self.batches_relent = 0
        # Set when the run is asked to stop: open steps may be completed, and no other step is opened.
        self.is_closing = False
        # Complete steps that are decided when an evaluation has ended, in this order.
        self.put_off: list[OpenStep] = []

    @abstractmethod
    def grants(self, candidates: Iterable[Member], version: int, now: float) -> list[list[Lease]]:
        """Grant and record new leases to these members; each list travels as one message."""

    @abstractmethod
    def admit(self, lease: Lease) -> str:
        """Return why the answer to a lease must be rejected, or an empty string."""

    @abstractmethod
    def take(self, lease: Lease) -> OpenStep | None:
        """Count an answer that was admitted; return its step if that completes it."""

    def staleness_of(self, lease: Lease) -> int:
        """How many updates of the model were decided since the version of this lease."""
        return 0

    def rate(self, open_step: OpenStep) -> float:
        """The factor on the learning rate with which a complete step is made."""
        return 1.0

    def advice(self) -> str:
        """A sentence for the user about how old updates are, once, if they are too old; else nothing."""
        return ""

    @abstractmethod
    def set_aside(self, step: int, span: Span) -> OpenStep | None:
        """Do without these batches of a step; return the step if that completes it."""

    @abstractmethod
    def give_back(self, lease: Lease, *, failed: bool = False, divided: bool = False) -> OpenStep | None:
        """Free the batches of a lease that ended without a good answer; return their step if it is open.

        `failed`: its node could not compute them. `divided`: one of them is bad, and no node is to blame.
        """

    @abstractmethod
    def stepped(self, step: int) -> Iterable[Member]:
        """Note that the learner has applied a complete step; return the members that may wait for that."""

    @abstractmethod
    def reopen(self, open_step: OpenStep) -> None:
        """Open a step again that was complete and has changed nothing, so that its batches are lent again."""

    @abstractmethod
    def overtake(self, now: float) -> None:
        """Find leases that are so late that another node should compute them too."""

    @abstractmethod
    def loaded(self, machine: str, load: float) -> None:
        """Note that the coordinator itself needs this share of a core on this machine."""

    @property
    @abstractmethod
    def open_steps(self) -> list[OpenStep]:
        """The steps that are begun and not complete."""

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether every step that was begun is applied, or is given up because the run stops."""

    def lend(
        self,
        member: Member,
        open_step: OpenStep,
        span: Span,
        version: int,
        now: float,
        *,
        updates: int = 0,
        ahead: float = 0.0,
    ) -> Lease:
        """Grant the member a lease on this span of a step."""
        number = self.leases.new_id()
        batches = span.count * open_step.plan.leaf_batches
        expected_at = self.members.lend(member, number, batches, now)
        lease = Lease(number, member.name, open_step.plan, span, version, now, expected_at, updates, ahead)
        self.leases.grant(lease)
        if any(back.holds(span) for back in open_step.returned):
            self.batches_relent += batches
        return lease


def share_of(lease: Lease) -> Share:
    """The part of a step that the answer to this lease gives."""
    return lease.span.start, lease.span.stop, lease.node, lease.id
