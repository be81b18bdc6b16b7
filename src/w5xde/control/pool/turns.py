"""Machines: nodes that share the cores of one computer take turns.

Ten processes on two cores are not sooner than two: each switch between them empties the caches, and the more
of them hold work, the older the version it was computed on. So only as many as can really run at once are
lent to, each for some batches, then the next ones. Nodes that mostly wait for something else than a core (a
disk, another device) are all in turn, and so is a node alone on its machine.
Knows no sockets and no clock: callers pass `now`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from w5xde.control.pool.members import Member

# A turn is about this long, or this many batches if they are quick: long enough that a switch does not
# matter, short enough that all nodes do the same number of batches.
TURN_SECONDS = 0.1
TURN_BATCHES_MAX = 256
# Nodes that need a core for less of their time than this do not stand in each other's way. Well below one,
# because other programs may keep a node from its core.
CORE_SHARE_MIN = 0.4
# The weight of the newest measurement of that.
_NEWEST = 0.1
# A coordinator that needs a core for so much of its time has it to itself, until it needs far less: one more
# process than cores, and always somebody waits whom the others need.
LOAD_MIN = 0.5
LOAD_AGAIN = 0.3
# One in turn who is this late with its answer does not keep the others waiting.
LATE_SECONDS = 0.25


class Machine:
    """One computer: who is in turn there, and who waits for it."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self._cores = max(1, slots)
        # How much of the time that its nodes are busy they need a core.
        self._core_share = 1.0
        # How much of a core the coordinator needs here, and whether it has one to itself.
        self._load = 0.0
        self._has_coordinator = False
        self._working: list[Member] = []
        self._waiting: list[Member] = []

    def __len__(self) -> int:
        return len(self._working) + len(self._waiting)

    @property
    def slots(self) -> int:
        cores = max(1, self._cores - self._has_coordinator)
        if self._core_share >= CORE_SHARE_MIN:
            return cores
        return int(cores / max(self._core_share, 0.001))

    @property
    def parallel(self) -> int:
        """How many of its nodes can run at once."""
        return min(self.slots, len(self))

    def measured(self, core_share: float) -> None:
        """A node needed a core for this share of the time that it was busy."""
        self._core_share += _NEWEST * (min(1.0, core_share) - self._core_share)
        self._fill()

    def loaded(self, load: float) -> None:
        """The coordinator needed this share of a core since it was asked last."""
        self._load += _NEWEST * (min(1.0, load) - self._load)
        self._has_coordinator = self._load > (LOAD_AGAIN if self._has_coordinator else LOAD_MIN)
        self._fill()

    def join(self, member: Member) -> None:
        # Who comes later does not have to make up for what the others did before.
        member.lent_batches = min((each.lent_batches for each in self._everybody()), default=0)
        self._waiting.append(member)
        self._fill()

    def _everybody(self) -> list[Member]:
        return self._working + self._waiting

    def leave(self, member: Member) -> None:
        if member in self._working:
            self._working.remove(member)
        else:
            self._waiting.remove(member)
        self._fill()

    def in_turn(self, now: float) -> list[Member]:
        """Who may be lent work now."""
        while len(self._working) > self.slots:
            self._waiting.append(self._working.pop())
        if self._waiting:
            for member in list(self._working):
                if member.turn_batches <= 0 or _is_late(member, now) or _is_unused(member, now):
                    self._pass_on(member, now)
        return self._working

    def _pass_on(self, member: Member, now: float) -> None:
        if all(_is_late(each, now) for each in self._waiting):
            return
        self._working.remove(member)
        self._begin(min((each for each in self._waiting if not _is_late(each, now)), key=_lent))
        self._waiting.append(member)

    def _fill(self) -> None:
        while self._waiting and len(self._working) < self.slots:
            self._begin(min(self._waiting, key=_lent))

    def _begin(self, member: Member) -> None:
        """Whoever was lent least is next."""
        self._waiting.remove(member)
        member.turn_batches = _turn(member)
        member.turn_ends = None
        self._working.append(member)


def _lent(member: Member) -> int:
    return member.lent_batches


def _turn(member: Member) -> int:
    if not member.compute_seconds:
        return 1
    return max(1, min(TURN_BATCHES_MAX, int(TURN_SECONDS / member.compute_seconds)))


def _is_unused(member: Member, now: float) -> bool:
    """Whether it was in turn for long and has nothing in hand: nobody lends to it, so others may try."""
    if member.turn_ends is None:
        member.turn_ends = now + 2 * TURN_SECONDS
    return not member.pending and now > member.turn_ends


def _is_late(member: Member, now: float) -> bool:
    return bool(member.pending) and now - member.free_at > LATE_SECONDS
