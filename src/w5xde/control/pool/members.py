"""Members: who is here, when last heard, how fast, and how much they hold.

Knows no sockets and no clock: callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from w5xde.control.pool.turns import Machine

# Nodes beat every two seconds; three missed beats and a little make a silent node a dead one.
SILENCE_SECONDS = 7.0
BEAT_SECONDS = 2.0
# A tick that comes this much late means that we were stopped or starved, not that the nodes were silent.
STALL_SECONDS = 1.0
# How fast an estimate follows a change: the weight of the newest measurement, and if it is quite another.
_NEWEST = 0.3
_NEWEST_IF_ANOTHER = 0.7


@dataclass(slots=True, eq=False)
class Member:
    """One node, from the coordinator's side."""

    name: str
    heard_at: float
    machine: Machine
    # Batches that may still be lent to it in this turn, and how many it was lent in all.
    turn_batches: int = 0
    # When that ends at the latest if it is lent nothing; None until somebody looks.
    turn_ends: float | None = None
    lent_batches: int = 0
    # Seconds a batch takes there, transfer included; None until it is known, or at first only guessed.
    batch_seconds: float | None = None
    is_guessed: bool = False
    # Of these, what the node itself computes: what remains when everything else goes fast.
    compute_seconds: float | None = None
    answers: int = 0
    idle_since: float = 0.0
    # Leases the node has in hand, cancelled ones too until it says so: lease id -> batches.
    pending: dict[int, int] = field(default_factory=dict)
    pending_batches: int = 0
    # How many batches one message may lend it: what it has shown that it cannot hold is halved.
    batches_max: int = 2**62
    # When it will have worked off what it holds, as far as we can tell.
    free_at: float = 0.0
    failures_in_a_row: int = 0

    @property
    def rate(self) -> float:
        """Batches a second; 0 while unknown."""
        return 1.0 / self.batch_seconds if self.batch_seconds else 0.0


class Members:
    """Everybody who may be lent work."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._machines: dict[str, Machine] = {}
        # How many of all can run at once.
        self.parallel = 0
        self._ticked_at: float | None = None
        # Kept up to date rather than summed whenever somebody asks.
        self.pool_rate = 0.0
        self.measured_count = 0
        self.pending_batches = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def join(
        self, name: str, now: float, machine: str = "", slots: int = 1, guess_seconds: float | None = None
    ) -> Member:
        """Take a node in; without the name of its machine it counts as one of its own."""
        if name in self._members:
            raise ValueError(f"{name} is here already")
        if self._ticked_at is None:
            self._ticked_at = now
        # The NUL keeps a node's own machine from being taken for one that somebody named.
        place = self._machines.setdefault(machine or f"\0{name}", Machine(machine or f"\0{name}", slots))
        member = Member(name, heard_at=now, machine=place, free_at=now, idle_since=now)
        self._members[name] = member
        if guess_seconds is not None:
            member.batch_seconds, member.is_guessed = guess_seconds, True
            self.pool_rate += member.rate
            self.measured_count += 1
        self.parallel -= place.parallel
        place.join(member)
        self.parallel += place.parallel
        return member

    def loaded(self, machine: str, load: float) -> None:
        """The coordinator itself needs this share of a core on a machine."""
        place = self._machines.get(machine)
        if place is not None:
            self.parallel -= place.parallel
            place.loaded(load)
            self.parallel += place.parallel

    def in_turn(self, candidates: Iterable[Member], now: float) -> list[Member]:
        """Who may be lent work now, on the machines of these."""
        machines = dict.fromkeys(member.machine for member in candidates)
        return [member for machine in machines for member in machine.in_turn(now)]

    def leave(self, name: str) -> Member | None:
        member = self._members.pop(name, None)
        if member is not None:
            self.pool_rate = sum(m.rate for m in self)
            self.measured_count -= member.batch_seconds is not None
            self.pending_batches -= member.pending_batches
            self.parallel -= member.machine.parallel
            member.machine.leave(member)
            self.parallel += member.machine.parallel
            if not len(member.machine):
                del self._machines[member.machine.name]
        return member

    def heard(self, name: str, now: float) -> None:
        member = self._members.get(name)
        if member is not None:
            member.heard_at = now

    def lend(self, member: Member, lease: int, batches: int, now: float) -> float:
        """Note that the member holds a lease; returns when we expect it back."""
        member.pending[lease] = batches
        member.pending_batches += batches
        member.turn_batches -= batches
        member.lent_batches += batches
        self.pending_batches += batches
        member.free_at = max(now, member.free_at) + batches * self.expected_batch_seconds(member)
        return member.free_at

    def returned(self, member: Member, lease: int, now: float) -> None:
        """The member is done with a lease, however it ended."""
        batches = member.pending.pop(lease, 0)
        member.pending_batches -= batches
        self.pending_batches -= batches
        member.free_at = now + member.pending_batches * self.expected_batch_seconds(member)
        if not member.pending:
            member.idle_since = now

    def cannot_hold(self, member: Member, batches: int) -> str:
        """Lend the member at most half of so many batches in one message; returns that if it is news."""
        half = max(1, batches // 2)
        if not batches or half >= member.batches_max:
            return ""
        member.batches_max = half
        return f"{member.name} cannot hold {batches} batches at once; it is lent at most {half}"

    def measured(
        self,
        member: Member,
        batch_seconds: float,
        compute_seconds: float | None = None,
        core_share: float | None = None,
    ) -> None:
        member.answers += 1
        if core_share is not None:
            self.parallel -= member.machine.parallel
            member.machine.measured(core_share)
            self.parallel += member.machine.parallel
        if member.answers == 1:
            return  # a first batch loads the model and warms up: it says nothing about the next
        computed = batch_seconds if compute_seconds is None else compute_seconds
        known_computed = computed if member.compute_seconds is None else member.compute_seconds
        member.compute_seconds = known_computed + _NEWEST * (computed - known_computed)
        before, known = member.rate, member.batch_seconds
        if known is None or member.is_guessed:
            member.batch_seconds, member.is_guessed = batch_seconds, False
            self.measured_count += known is None
        else:
            is_another = not known / 2 < batch_seconds < known * 2
            member.batch_seconds = known + (_NEWEST_IF_ANOTHER if is_another else _NEWEST) * (
                batch_seconds - known
            )
        self.pool_rate += member.rate - before

    def expected_batch_seconds(self, member: Member) -> float:
        """What we know of the member, else what is usual in the pool."""
        if member.batch_seconds is not None:
            return member.batch_seconds
        return self.measured_count / self.pool_rate if self.pool_rate > 0 else 0.0

    def forgive_stall(self, now: float, expected_seconds: float) -> float:
        """Called at every tick. If we ourselves were stopped, nobody is blamed for that time."""
        before, self._ticked_at = self._ticked_at, now
        if before is None or now - before < expected_seconds + STALL_SECONDS:
            return 0.0
        stall = now - before - expected_seconds
        for member in self:
            # What was heard after we woke up needs no forgiveness.
            member.heard_at = min(now, member.heard_at + stall)
            member.free_at += stall
        return stall

    def silent(self, now: float) -> list[Member]:
        return [m for m in self if now - m.heard_at > SILENCE_SECONDS]
