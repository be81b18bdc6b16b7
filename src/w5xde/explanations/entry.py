"""One explanation: what an error means, beyond the lines it is told in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an error code means: in a title, why it happens, what to do, and one example."""

    code: str
    title: str
    why: str
    fix: str
    # Lines to type or to write, as they would stand in a terminal or a file.
    example: str
