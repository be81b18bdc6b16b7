"""The part of a terminal that is drawn again and again, below lines that stay.

When the terminal changes its size, it moves lines around in ways that no program can foresee, so everything
is wiped and printed again. Knows nothing of what is drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live

# A terminal that is closed, or a pipe that nobody reads.
CLOSED = (OSError, ValueError, SystemExit)


class LivePanel:
    """A panel at the end of what a console shows; `repeat` prints again what stands above it."""

    def __init__(self, console: Console, repeat: Callable[[], None]) -> None:
        self._console = console
        self._repeat = repeat
        self._size = console.size
        self._live = self._new()

    def _new(self) -> Live:
        live = Live(console=self._console, auto_refresh=False)
        live.start()
        return live

    def draw(self, panel: Callable[[], RenderableType]) -> None:
        """Draw the panel. Raises one of CLOSED if the terminal is gone."""
        size = self._console.size
        if size != self._size:
            self._size = size
            self._live.stop()
            self._console.control(Control.clear(), Control.home())
            self._repeat()
            self._live = self._new()
        self._live.update(panel(), refresh=True)

    def close(self) -> None:
        """Leave the panel as it is."""
        with contextlib.suppress(*CLOSED):
            self._live.stop()
