"""Members: the nodes of the pool, when each was last heard, how fast it is, and which leases it holds.

Knows no sockets and no clock: callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from w5xde.control.pool.turns import MachineTurns

# A node beats every two seconds, and counts as dead after three missed beats and a second.
SILENCE_SECONDS = 7.0
BEAT_SECONDS = 2.0
# A tick that is this late means that the coordinator was stopped or starved, not that nodes were silent.
STALL_SECONDS = 1.0
# The weight of the newest measurement in an estimate, and its weight if it differs by a factor of two.
_NEWEST = 0.3
_NEWEST_IF_ANOTHER = 0.7


@dataclass(slots=True, eq=False)
class Member:
    """One node, as the coordinator sees it."""

    name: str
    heard_at: float
    machine: MachineTurns
    # Batches that may still be lent to it in this turn.
    turn_batches: int = 0
    # When its turn ends if it is lent nothing; None until the turn is first looked at.
    turn_ends: float | None = None
    # Batches that it was lent in all its turns.
    lent_batches: int = 0
    # Seconds per batch, transfer included; None until it is known, and at first perhaps a guess.
    batch_seconds: float | None = None
    is_guessed: bool = False
    # The part of batch_seconds for which the node computes.
    compute_seconds: float | None = None
    answers: int = 0
    # How many updates late its answers are on average (async mode); None until one came.
    staleness: float | None = None
    idle_since: float = 0.0
    # Batches of each lease that the node holds, by lease id; cancelled ones stay until the node answers.
    pending: dict[int, int] = field(default_factory=dict)
    pending_batches: int = 0
    # How many batches one message may lend it: halved when the node could not hold a message.
    batches_max: int = 2**62
    # When it should have computed all that it holds.
    free_at: float = 0.0
    failures_in_a_row: int = 0

    @property
    def rate(self) -> float:
        """Batches a second; 0 while unknown."""
        return 1.0 / self.batch_seconds if self.batch_seconds else 0.0


class Members:
    """All nodes that may be lent work."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._machines: dict[str, MachineTurns] = {}
        # The number of nodes that can run at once, on all machines.
        self.parallel = 0
        self._ticked_at: float | None = None
        # Kept up to date, because they are read far more often than they change.
        self.pool_rate = 0.0
        self.measured_count = 0
        self.pending_batches = 0

    def __len__(self) -> int:
        return len(self._members)

    def is_alone(self, batches: int) -> bool:
        """Return whether at most one member has memory for this many batches at once."""
        able = self._members if batches == 1 else [m for m in self if batches <= m.batches_max]
        return len(able) <= 1

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def join(
        self, name: str, now: float, machine: str = "", slots: int = 1, guess_seconds: float | None = None
    ) -> Member:
        """Add a node; without the name of its machine it counts as alone on one."""
        if name in self._members:
            raise ValueError(f"{name} is a member already")
        if self._ticked_at is None:
            self._ticked_at = now
        # With the NUL no node can name this machine.
        machine = machine or f"\0{name}"
        place = self._machines.setdefault(machine, MachineTurns(machine))
        member = Member(name, heard_at=now, machine=place, free_at=now, idle_since=now)
        self._members[name] = member
        if guess_seconds is not None:
            member.batch_seconds, member.is_guessed = guess_seconds, True
            self.pool_rate += member.rate
            self.measured_count += 1
        self._update(place, lambda: place.join(member, slots))
        return member

    def loaded(self, machine: str, load: float) -> None:
        """The coordinator needs this share of a core on this machine."""
        place = self._machines.get(machine)
        if place is not None:
            self._update(place, lambda: place.loaded(load))

    def _update(self, place: MachineTurns, change: Callable[[], None]) -> None:
        """Make a change to a machine, and update the number of nodes that can run at once."""
        self.parallel -= place.parallel
        change()
        self.parallel += place.parallel

    def in_turn(self, candidates: Iterable[Member], now: float) -> list[Member]:
        """The nodes that may be lent work now, of all on the machines of these candidates."""
        machines = dict.fromkeys(member.machine for member in candidates)
        return [member for machine in machines for member in machine.in_turn(now)]

    def leave(self, name: str) -> Member | None:
        member = self._members.pop(name, None)
        if member is not None:
            self.pool_rate = sum(m.rate for m in self)
            self.measured_count -= member.batch_seconds is not None
            self.pending_batches -= member.pending_batches
            self._update(member.machine, lambda: member.machine.leave(member))
            if not len(member.machine):
                del self._machines[member.machine.name]
        return member

    def heard(self, name: str, now: float) -> None:
        member = self._members.get(name)
        if member is not None:
            member.heard_at = now

    def lend(self, member: Member, lease: int, batches: int, now: float) -> float:
        """Note that the member holds a lease; returns when its answer is expected."""
        member.pending[lease] = batches
        member.pending_batches += batches
        member.turn_batches -= batches
        member.lent_batches += batches
        self.pending_batches += batches
        member.free_at = max(now, member.free_at) + batches * self.expected_batch_seconds(member)
        return member.free_at

    def returned(self, member: Member, lease: int, now: float) -> None:
        """Note that the member no longer holds a lease, however the lease ended."""
        batches = member.pending.pop(lease, 0)
        member.pending_batches -= batches
        self.pending_batches -= batches
        member.free_at = now + member.pending_batches * self.expected_batch_seconds(member)
        if not member.pending:
            member.idle_since = now

    def cannot_hold(self, member: Member, batches: int) -> str:
        """From now on lend the member at most half of this many batches in one message.

        Returns a sentence about that, or an empty string if its limit was lower already.
        """
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
            self._update(member.machine, lambda: member.machine.measured(core_share))
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
        """The member's measured or guessed time, or else the mean of the pool."""
        if member.batch_seconds is not None:
            return member.batch_seconds
        return self.measured_count / self.pool_rate if self.pool_rate > 0 else 0.0

    def forgive_stall(self, now: float, expected_seconds: float) -> float:
        """Called at every tick. Returns how long the coordinator stood still; no node is blamed for that."""
        before, self._ticked_at = self._ticked_at, now
        if before is None or now - before < expected_seconds + STALL_SECONDS:
            return 0.0
        stall = now - before - expected_seconds
        for member in self:
            # A node that was heard after the stall is not moved into the future.
            member.heard_at = min(now, member.heard_at + stall)
            member.free_at += stall
        return stall

    def silent(self, now: float) -> list[Member]:
        return [m for m in self if now - m.heard_at > SILENCE_SECONDS]
