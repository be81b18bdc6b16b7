"""The feed of a run: what the actor of its coordinator tells drivers, who may come late or twice.

Safe for threads. Knows no Ray.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from dataclasses import dataclass, field

from w5xde.engines.minded import Ended

# What a driver that comes late can still read.
LINES_KEPT = 500


@dataclass(frozen=True, slots=True)
class News:
    """What is new since a driver has last asked. `lines` count by `seen`, in one `life` of the actor."""

    life: str
    seen: int
    lines: list[str] = field(default_factory=list)
    # The hosts of the nodes that have found a place, by their numbers.
    hosts: dict[int, str] = field(default_factory=dict)
    # The nodes that have given up, by their numbers.
    failed: dict[int, Ended] = field(default_factory=dict)
    ended: Ended | None = None
    # Why the actor stopped its command, if the cluster is the reason.
    trouble: str = ""


class Feed:
    """Collects news, and lets drivers wait for them."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(4)
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._said = 0
        self._hosts: dict[int, str] = {}
        self._failed: dict[int, Ended] = {}
        self._ended: Ended | None = None
        self._trouble = ""

    def say(self, line: str) -> None:
        """Add a line for the user."""
        with self._changed:
            self._lines.append(line)
            self._said += 1
            self._changed.notify_all()

    def placed(self, node: int, host: str) -> None:
        """A node runs on this host."""
        with self._changed:
            self._hosts[node] = host

    def failed(self, node: int, ended: Ended) -> None:
        """A node has given up."""
        with self._changed:
            self._failed[node] = ended
            self._changed.notify_all()

    def end(self, ended: Ended, trouble: str = "") -> None:
        """The coordinator's command has ended for good."""
        with self._changed:
            self._ended, self._trouble = ended, trouble
            self._changed.notify_all()

    def news(self, life: str, seen: int, wait_seconds: float) -> News:
        """What is new for a driver that has seen so many lines of this life; waits a while for something."""
        seen = seen if life == self._life else 0
        with self._changed:
            self._changed.wait_for(lambda: self._said > seen or self._ended is not None, wait_seconds)
            missed = list(self._lines)[-(self._said - seen) :] if self._said > seen else []
            return News(
                self._life,
                self._said,
                missed,
                dict(self._hosts),
                dict(self._failed),
                self._ended,
                self._trouble,
            )
