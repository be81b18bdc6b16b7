"""Connection limits: which connections are accepted before they have authenticated, and which are logged.

An unauthenticated connection costs memory, time and lines in the log. Each of these has a limit, per address
and in total; a connection that has authenticated no longer counts. The decision comes before the TLS
handshake, because that costs most. Knows no sockets or clock: callers pass `now`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# With what TLS reserves for each connection (256 KiB) these take 20 MiB at most.
UNAUTHENTICATED_MAX = 64
UNAUTHENTICATED_PER_ADDRESS_MAX = 8
# For processes of this machine more than for another address: many local nodes start at once, and a hostile
# program that runs here could do worse than connect. But half of the places stay free for other addresses.
UNAUTHENTICATED_HERE_MAX = 32
# How long a connection may take from its first packet until it has authenticated.
AUTHENTICATION_SECONDS = 10.0
# When all places are taken, the oldest connection is closed if it had at least this long: handshake and
# greeting take five one-way trips through the network, and few networks take 200 ms for one.
PROTECTED_SECONDS = 1.0
# A handshake takes about a millisecond of a core. After a restart all nodes of a network reconnect within
# seconds.
HANDSHAKES_PER_SECOND, HANDSHAKES_AT_ONCE = 10.0, 20.0
HANDSHAKES_PER_SECOND_ALL, HANDSHAKES_AT_ONCE_ALL = 100.0, 100.0
# Handshakes reserved for addresses that rarely connect: a node fetches the certificate, connects, and tries
# again after a second if it is refused.
HANDSHAKES_RESERVED = 50.0
RARE_PER_SECOND, RARE_AT_ONCE = 2.0, 10.0
# An address that shows this many wrong secrets within the first time is blocked for the second.
FAILURES_MAX, FAILURES_SECONDS, BLOCKED_SECONDS = 5, 60.0, 60.0
# The log gets one line per address and reason in this time; further refusals are counted.
LOG_SECONDS = 60.0
# Beyond this number of addresses the oldest is forgotten.
ADDRESSES_MAX = 4096


@dataclass(slots=True)
class _TokenBucket:
    """A rate limit: `at_once` tokens at first, then `per_second` new ones."""

    per_second: float
    at_once: float
    level: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.at_once

    def has(self, now: float, left: float = 0.0) -> bool:
        """Whether a token can be taken and `left` tokens would remain."""
        self.level = min(self.at_once, self.level + max(0.0, now - self.at) * self.per_second)
        self.at = now
        return self.level >= 1.0 + left

    def part_used(self, now: float) -> float:
        """The part of the tokens that is used up: 0 to 1."""
        self.has(now)
        return 1.0 - self.level / self.at_once


@dataclass(slots=True)
class _AddressState:
    """What is remembered of an address."""

    unauthenticated: int = 0
    handshakes: _TokenBucket = field(
        default_factory=lambda: _TokenBucket(HANDSHAKES_PER_SECOND, HANDSHAKES_AT_ONCE)
    )
    # Empty if the address connected often recently, accepted or not.
    rare: _TokenBucket = field(default_factory=lambda: _TokenBucket(RARE_PER_SECOND, RARE_AT_ONCE))
    failures: list[float] = field(default_factory=list)
    blocked_until: float = 0.0
    # By reason: when a refusal was logged, and how many were only counted since.
    counted: dict[str, tuple[float, int]] = field(default_factory=dict)


class ConnectionLimits:
    """All unauthenticated connections of a run."""

    def __init__(self) -> None:
        self.unauthenticated = 0
        self._addresses: dict[str, _AddressState] = {}
        self._handshakes = _TokenBucket(HANDSHAKES_PER_SECOND_ALL, HANDSHAKES_AT_ONCE_ALL)

    def refusal(
        self, address: str, now: float, *, is_here: bool, shakes_hands: bool, oldest_came_at: float
    ) -> str:
        """Why a new connection must be closed at once; empty if it is accepted and counts until `release`.

        If then `is_over_limit`, the oldest connection, which came at `oldest_came_at`, must be closed.
        """
        known = self._address(address)
        if now < known.blocked_until:
            return "wrong secrets came from there"
        most = UNAUTHENTICATED_HERE_MAX if is_here else UNAUTHENTICATED_PER_ADDRESS_MAX
        if known.unauthenticated >= most:
            return "too many at a time"
        if self.unauthenticated >= UNAUTHENTICATED_MAX and now < oldest_came_at + PROTECTED_SECONDS:
            return "too many strangers at a time"
        if shakes_hands:
            left = HANDSHAKES_RESERVED * known.rare.part_used(now)
            known.rare.level = max(0.0, known.rare.level - 1.0)
            if not known.handshakes.has(now):
                return "too many handshakes a second"
            if not self._handshakes.has(now, left):
                return "too many handshakes a second, from everywhere"
            known.handshakes.level -= 1.0
            self._handshakes.level -= 1.0
        known.unauthenticated += 1
        self.unauthenticated += 1
        return ""

    @property
    def is_over_limit(self) -> bool:
        return self.unauthenticated > UNAUTHENTICATED_MAX

    def release(self, address: str) -> None:
        """An accepted connection has authenticated, or is closed."""
        self.unauthenticated -= 1
        if address in self._addresses:
            self._addresses[address].unauthenticated -= 1

    def failed(self, address: str, now: float) -> None:
        """A connection from this address showed a wrong secret."""
        known = self._address(address)
        known.failures = [at for at in known.failures if now - at < FAILURES_SECONDS] + [now]
        if len(known.failures) >= FAILURES_MAX:
            known.failures.clear()
            known.blocked_until = now + BLOCKED_SECONDS

    # --- the log ------------------------------------------------------------------------------------

    def should_log(self, address: str, kind: str, now: float) -> bool:
        """Whether this refusal gets its own line in the log; if not, it is counted."""
        counted = self._address(address).counted
        since, count = counted.get(kind, (now, -1))
        counted[kind] = since, count + 1
        return count < 0

    def log_lines(self, now: float) -> list[str]:
        """A line for each address and reason whose refusals were counted for long enough."""
        lines = []
        for address, known in self._addresses.items():
            for kind, (since, count) in list(known.counted.items()):
                if now - since >= LOG_SECONDS:
                    del known.counted[kind]
                    if count:
                        what = f"{count} more {'connection was' if count == 1 else 'connections were'}"
                        lines.append(f"{what} turned away from {address} within {now - since:.0f} s ({kind})")
        return lines

    def _address(self, address: str) -> _AddressState:
        known = self._addresses.get(address)
        if known is None:
            if len(self._addresses) >= ADDRESSES_MAX:
                # There are more addresses than unauthenticated connections, so one of them has none.
                idle = (each for each, other in self._addresses.items() if not other.unauthenticated)
                del self._addresses[next(idle)]
            known = self._addresses[address] = _AddressState()
        return known
