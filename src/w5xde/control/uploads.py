"""Uploads: which node may send its large update now.

Large updates enter one at a time, in the order in which they are added up: otherwise each node's vector
would need its memory at once, and most would wait there for another. A node on a slow link does not keep the
others out: after a moment the next one may begin, too. Knows no sockets and no clock: callers pass `now`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

# On one machine or a fast network a vector of a hundred megabytes has arrived by then.
PATIENCE_SECONDS = 0.25
# A link that is known to be fast is waited for this many times as long as it should take, within a limit.
PATIENCE_FACTOR, PATIENCE_SECONDS_MAX = 3.0, 1.0
# No upload waits longer: the sender's system gives up a connection on which nothing moves for ten seconds.
WAIT_SECONDS_MAX = 4.0

Sender = TypeVar("Sender", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Announced:
    """An update whose header has arrived, and whose body comes next.

    `order`: its step and its first batch there. `link`: bytes a second to expect; 0 if unknown.
    """

    order: tuple[int, ...]
    body_bytes: int
    link: float = 0.0

    @property
    def patience_seconds(self) -> float:
        """How long the others wait for it before the next one may begin."""
        seconds = self.body_bytes / self.link if self.link else math.inf
        if seconds > PATIENCE_SECONDS_MAX:
            return PATIENCE_SECONDS
        return max(PATIENCE_SECONDS, min(PATIENCE_FACTOR * seconds, PATIENCE_SECONDS_MAX))


class UploadQueue(Generic[Sender]):
    """Decides whose large body is read next."""

    def __init__(self, budget_bytes: float = math.inf) -> None:
        """All bodies that arrive at a time must fit into the budget."""
        self._budget_bytes = budget_bytes
        # What arrives: its size, and until when no other may begin.
        self._arriving: dict[Sender, tuple[int, float]] = {}
        # What waits, and since when.
        self._waiting: dict[Sender, tuple[Announced, float]] = {}

    def ask(self, sender: Sender, upload: Announced, now: float) -> bool:
        """Whether the body may come now. If not, `tick` or `end` names the sender later."""
        if self._is_free(now) and self._has_room(upload):
            self._begin(sender, upload, now)
            return True
        self._waiting[sender] = (upload, now)
        return False

    def end(self, sender: Sender, now: float) -> list[Sender]:
        """The body has arrived, or never will. Returns the senders that may begin now."""
        self._waiting.pop(sender, None)
        if self._arriving.pop(sender, None) is None:
            return []
        return self.tick(now)

    def tick(self, now: float) -> list[Sender]:
        """The senders that may begin now."""
        if not self._waiting:
            return []
        begun = []
        for sender, (upload, since) in list(self._waiting.items()):
            if now - since > WAIT_SECONDS_MAX and self._has_room(upload):
                begun.append(self._begin(sender, upload, now))
        while self._waiting and self._is_free(now):
            first = min(self._waiting, key=self._place_of)
            upload, _ = self._waiting[first]
            if not self._has_room(upload):
                break
            begun.append(self._begin(first, upload, now))
        return begun

    def is_waiting(self, sender: Sender) -> bool:
        """Whether the coordinator keeps this sender waiting: then its silence is not its fault."""
        return sender in self._waiting

    @property
    def waiting(self) -> list[Sender]:
        return list(self._waiting)

    def _begin(self, sender: Sender, upload: Announced, now: float) -> Sender:
        self._waiting.pop(sender, None)
        self._arriving[sender] = (upload.body_bytes, now + upload.patience_seconds)
        return sender

    def _place_of(self, sender: Sender) -> tuple[tuple[int, ...], float]:
        upload, since = self._waiting[sender]
        return upload.order, since

    def _is_free(self, now: float) -> bool:
        return all(now > until for _, until in self._arriving.values())

    def _has_room(self, upload: Announced) -> bool:
        # One may always come: a body that no budget allows was refused for its length.
        taken = sum(body_bytes for body_bytes, _ in self._arriving.values())
        return not taken or taken + upload.body_bytes <= self._budget_bytes
