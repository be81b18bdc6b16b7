"""Progress of a benchmark: what is being measured, as a line for each part. Loads no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

# What a suite calls with the name of each part that it measures.
Say = Callable[[str], None]


class ProgressLine:
    """Writes what is being measured to stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_at:6.1f} s  {text} …", file=sys.stderr, flush=True)
