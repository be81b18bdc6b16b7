"""The doorman: how many strangers may stand at the door, who must wait, and what is told of them.

A stranger is a connection that has not shown yet who it is. Strangers cost memory, time and lines in the log,
so each of these has a limit, per address and for all of them; whoever is known does not count. Decides before
a handshake begins, because that is what costs most. Knows no sockets or clock: callers pass `now`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# With what TLS reserves for each (256 KiB) these take 20 MiB at most.
STRANGERS_MAX = 64
STRANGERS_PER_ADDRESS_MAX = 8
# Processes of this machine: many nodes may start here at once, and whoever runs programs here can do worse.
# But half of the places stay free for others.
STRANGERS_HERE_MAX = 32
# From its first packet on a stranger has so long to show who it is.
STRANGER_SECONDS = 10.0
# Where all places are taken, the one that came first must go once it had so long: handshake and greeting take
# five ways through the network, and few networks take 200 ms for one.
UNDISTURBED_SECONDS = 1.0
# A handshake takes about a millisecond of a core. After a restart all nodes of a network come within seconds.
HANDSHAKES_PER_SECOND, HANDSHAKES_AT_ONCE = 10.0, 20.0
HANDSHAKES_PER_SECOND_ALL, HANDSHAKES_AT_ONCE_ALL = 100.0, 100.0
# What those leave of it who come often, for those who come seldom: a node looks at the certificate, comes in,
# and if it may not, tries again after a second.
HANDSHAKES_LEFT_FOR_OTHERS = 50.0
SELDOM_PER_SECOND, SELDOM_AT_ONCE = 2.0, 10.0
# Wrong secrets within so long, after which the address is not heard for so long.
FAILURES_MAX, FAILURES_SECONDS, SHUT_OUT_SECONDS = 5, 60.0, 60.0
# One line for each address and reason in so long; the rest are counted.
NEWS_SECONDS = 60.0
# Whoever has more addresses than this is forgotten in the order of coming.
ADDRESSES_MAX = 4096


@dataclass(slots=True)
class _Bucket:
    """How many may still begin: some at once, then so many a second."""

    per_second: float
    at_once: float
    level: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.at_once

    def has(self, now: float, left: float = 0.0) -> bool:
        """Whether one more may begin, and so many would still be left."""
        self.level = min(self.at_once, self.level + max(0.0, now - self.at) * self.per_second)
        self.at = now
        return self.level >= 1.0 + left

    def part_used(self, now: float) -> float:
        """How far it is empty: 0 to 1."""
        self.has(now)
        return 1.0 - self.level / self.at_once


@dataclass(slots=True)
class _Known:
    """What is remembered of an address."""

    strangers: int = 0
    handshakes: _Bucket = field(default_factory=lambda: _Bucket(HANDSHAKES_PER_SECOND, HANDSHAKES_AT_ONCE))
    # Empty, if it came often of late, whether it was let in or not.
    seldom: _Bucket = field(default_factory=lambda: _Bucket(SELDOM_PER_SECOND, SELDOM_AT_ONCE))
    failures: list[float] = field(default_factory=list)
    shut_out_until: float = 0.0
    # Since when connections are counted rather than told, by reason; and how many.
    counted: dict[str, tuple[float, int]] = field(default_factory=dict)


class Doorman:
    """All strangers of a run."""

    def __init__(self) -> None:
        self.strangers = 0
        self._addresses: dict[str, _Known] = {}
        self._handshakes = _Bucket(HANDSHAKES_PER_SECOND_ALL, HANDSHAKES_AT_ONCE_ALL)

    def knock(
        self, address: str, now: float, *, is_here: bool, shakes_hands: bool, oldest_came_at: float
    ) -> str:
        """Why this stranger must go at once; nothing if it may stay, until `gone` is said of it.

        If then `is_overfull`, the stranger that came first, at that time, has to make room for it.
        """
        known = self._known(address)
        if now < known.shut_out_until:
            return "wrong secrets came from there"
        if known.strangers >= (STRANGERS_HERE_MAX if is_here else STRANGERS_PER_ADDRESS_MAX):
            return "too many at a time"
        if self.strangers >= STRANGERS_MAX and now < oldest_came_at + UNDISTURBED_SECONDS:
            return "too many strangers at a time"
        if shakes_hands:
            left = HANDSHAKES_LEFT_FOR_OTHERS * known.seldom.part_used(now)
            known.seldom.level = max(0.0, known.seldom.level - 1.0)
            if not known.handshakes.has(now):
                return "too many handshakes a second"
            if not self._handshakes.has(now, left):
                return "too many handshakes a second, from everywhere"
            known.handshakes.level -= 1.0
            self._handshakes.level -= 1.0
        known.strangers += 1
        self.strangers += 1
        return ""

    @property
    def is_overfull(self) -> bool:
        return self.strangers > STRANGERS_MAX

    def gone(self, address: str) -> None:
        """One that was let stay has shown who it is, or is gone."""
        self.strangers -= 1
        if address in self._addresses:
            self._addresses[address].strangers -= 1

    def failed(self, address: str, now: float) -> None:
        """It did not have the secret."""
        known = self._known(address)
        known.failures = [at for at in known.failures if now - at < FAILURES_SECONDS] + [now]
        if len(known.failures) >= FAILURES_MAX:
            known.failures.clear()
            known.shut_out_until = now + SHUT_OUT_SECONDS

    # --- what is told -------------------------------------------------------------------------------

    def is_news(self, address: str, kind: str, now: float) -> bool:
        """Whether it is worth a line that somebody from there was turned away; if not, it is counted."""
        counted = self._known(address).counted
        if kind in counted:
            since, count = counted[kind]
            counted[kind] = since, count + 1
            return False
        counted[kind] = now, 0
        return True

    def news(self, now: float) -> list[str]:
        """Of those who were only counted, once their minute is over."""
        told = []
        for address, known in self._addresses.items():
            for kind, (since, count) in list(known.counted.items()):
                if now - since >= NEWS_SECONDS:
                    del known.counted[kind]
                    if count:
                        what = f"{count} more {'connection was' if count == 1 else 'connections were'}"
                        told.append(f"{what} turned away from {address} within {now - since:.0f} s ({kind})")
        return told

    def _known(self, address: str) -> _Known:
        known = self._addresses.get(address)
        if known is None:
            if len(self._addresses) >= ADDRESSES_MAX:
                self._forget_one()
            known = self._addresses[address] = _Known()
        return known

    def _forget_one(self) -> None:
        # There are more addresses than strangers, so one has none.
        del self._addresses[next(each for each, known in self._addresses.items() if not known.strangers)]
