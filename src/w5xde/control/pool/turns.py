"""Turns: nodes that share the cores of one machine are lent work in turns.

Ten processes on two cores are not faster than two: each switch between them empties the caches, and the more
of them hold work, the older the version that they computed it on. So work is lent only to as many nodes as
there are cores, for some batches each, and then to the next ones. Nodes that mostly wait for something other
than a core (a disk, another device) are all in turn, and so is a node alone on its machine.
Knows no sockets and no clock: callers pass `now`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from w5xde.control.pool.members import Member

# A turn lasts about this long, or this many batches if they are quick: long enough that a switch does not
# matter, short enough that all nodes compute the same number of batches.
TURN_SECONDS = 0.1
TURN_BATCHES_MAX = 256
# Nodes that need a core for a smaller share of their time than this do not delay each other. Well below one,
# because other programs may keep a node from its core.
CORE_SHARE_MIN = 0.4
# The weight of the newest measurement of that share.
_NEWEST = 0.1
# A coordinator that needs a core for LOAD_MIN of its time gets one to itself, until it needs less than
# LOAD_AGAIN: with one more process than cores, a process that the others need would always wait.
LOAD_MIN = 0.5
LOAD_AGAIN = 0.3
# A node in turn that is this late with its answer loses its turn.
LATE_SECONDS = 0.25


class MachineTurns:
    """The nodes of one machine: those in turn, and those that wait for a turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._cores = 1
        # The share of their busy time for which the nodes need a core.
        self._core_share = 1.0
        # The share of a core that the coordinator needs on this machine, and whether it has one to itself.
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
        """The number of its nodes that can run at once."""
        return min(self.slots, len(self))

    def measured(self, core_share: float) -> None:
        """A node needed a core for this share of the time that it was busy."""
        self._core_share += _NEWEST * (min(1.0, core_share) - self._core_share)
        self._fill()

    def loaded(self, load: float) -> None:
        """The coordinator needed this share of a core since the last call."""
        self._load += _NEWEST * (min(1.0, load) - self._load)
        self._has_coordinator = self._load > (LOAD_AGAIN if self._has_coordinator else LOAD_MIN)
        self._fill()

    def join(self, member: Member, slots: int) -> None:
        """Add a node that may use this many cores; another node may be allowed fewer of them."""
        self._cores = max(self._cores, slots)
        # A node that joins later does not catch up on what the others were lent before.
        everyone = self._working + self._waiting
        member.lent_batches = min((each.lent_batches for each in everyone), default=0)
        self._waiting.append(member)
        self._fill()

    def leave(self, member: Member) -> None:
        (self._working if member in self._working else self._waiting).remove(member)
        self._fill()

    def in_turn(self, now: float) -> list[Member]:
        """The nodes that may be lent work now."""
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
        """Give a waiting node its turn."""
        self._waiting.remove(member)
        member.turn_batches = _turn(member)
        member.turn_ends = None
        self._working.append(member)


def _lent(member: Member) -> int:
    return member.lent_batches


def _turn(member: Member) -> int:
    if not member.compute_seconds:
        return 1
    # The quotient may be infinite: nodes themselves say how long they computed.
    return max(1, int(min(TURN_SECONDS / member.compute_seconds, TURN_BATCHES_MAX)))


def _is_unused(member: Member, now: float) -> bool:
    """Whether a node was in turn for long and is lent nothing: then another node may have its turn."""
    if member.turn_ends is None:
        member.turn_ends = now + 2 * TURN_SECONDS
    return not member.pending and now > member.turn_ends


def _is_late(member: Member, now: float) -> bool:
    return bool(member.pending) and now - member.free_at > LATE_SECONDS
