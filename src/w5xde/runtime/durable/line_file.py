"""A file of lines that only grows; or, with a limit, two files in turn, of which the newest lines are kept.

Knows nothing of what the lines say.
"""

from __future__ import annotations

from pathlib import Path


class LineFile:
    """Appends lines to a file."""

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        """With a limit, a file that is full becomes `NAME.1`, in place of the one before it."""
        self._path = path
        self._limit_bytes = limit_bytes
        self._open()

    def _open(self) -> None:
        # Line by line, so that a killed process leaves whole lines.
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._size = self._file.tell()

    def write(self, line: str) -> None:
        """Append a line; raises OSError if that is not possible."""
        if self._limit_bytes is not None and self._size >= self._limit_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._open()
        self._file.write(line + "\n")
        self._size += len(line) + 1

    def close(self) -> None:
        self._file.close()
