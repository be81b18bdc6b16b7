"""One explanation of an error. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an error code means: in a title, why it happens, what to do, and one example."""

    code: str
    title: str
    why: str
    fix: str
    # Lines for a terminal or a file.
    example: str
