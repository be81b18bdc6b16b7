"""The log of a run: sentences for its user, which views show, and which the ledger keeps. Decides nothing."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from w5xde.control import events as ev
from w5xde.runtime.durable.journal import Journal

# More than any view shows at a time.
EVENTS_KEPT = 200


class RunLog:
    """The newest events of one run."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # For views: (monotonic time, kind, sentence).
        self.events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_KEPT)

    def show(self, note: ev.Note) -> None:
        """Show a note of the core, which is in the ledger already."""
        self.events.append((time.monotonic(), note.kind, note.text))

    def log(self, kind: str, text: str, **facts: Any) -> None:
        """Show a note that is not from the core, and write it to the ledger."""
        self.show(ev.Note(kind, text))
        self._journal.record({"kind": kind, "text": text, **facts})

    def storage(self, text: str) -> None:
        """Log a sentence about files that cannot be written or read."""
        self.log("storage", text)
