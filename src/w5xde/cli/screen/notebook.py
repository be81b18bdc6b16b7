"""Progress in a notebook: one line of a cell's output that is written again and again. Knows no run."""

from __future__ import annotations

import sys
from typing import IO


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # The IPython of a terminal has no kernel.
    return shell is not None and hasattr(shell, "kernel")


class OneLine:
    """The last line of a cell's output, which a carriage return lets us write again."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._length = 0

    def show(self, text: str) -> None:
        """Replace the line by this text."""
        padding = " " * max(0, self._length - len(text))
        self._stream.write(f"\r{text}{padding}")
        self._stream.flush()
        self._length = len(text)

    def clear(self) -> None:
        """Make room for another text, which stays above the line."""
        if self._length:
            self.show("")
            self._stream.write("\r")

    def close(self) -> None:
        """Let the line stay as it is."""
        if self._length:
            self._stream.write("\n")
            self._length = 0
