"""Whether a run is going on, by its files alone: its manifest, its newest row, and the process in its lock.

Never takes the lock: a coordinator that starts at that moment would be refused.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

# A coordinator writes a row every second, and a slow step must not make it look dead.
NEWS_SECONDS = 3.0
# The lock of a run on another machine names a process that cannot be looked for.
ELSEWHERE_SECONDS = 30.0

Word = Literal["starting", "training", "done", "stopped", "failed", "gone"]
OVER: set[Word] = {"done", "stopped", "failed", "gone"}


@dataclass(frozen=True, slots=True)
class FollowedState:
    """What a run is doing, in a word and in a sentence."""

    word: Word
    text: str

    @property
    def is_over(self) -> bool:
        return self.word in OVER


def state_of(folder: Path, manifest: Mapping[str, Any], row_age_seconds: float | None) -> FollowedState:
    """The state of a run whose newest row is so old; None: it has no row."""
    result = manifest.get("result")
    if isinstance(result, dict):
        return _ended(result, str(manifest.get("reason", "")))
    if _is_alive(folder / "lock", row_age_seconds):
        return FollowedState("starting", "waits for its first node") if row_age_seconds is None else _TRAINING
    return FollowedState("gone", f"its coordinator is gone; go on:  w5xde train --resume {folder.name}")


_TRAINING = FollowedState("training", "")


def _ended(result: dict[str, Any], reason: str) -> FollowedState:
    if result.get("error"):
        return FollowedState("failed", reason)
    if result.get("over", True):
        return FollowedState("done", reason)
    return FollowedState("stopped", reason)


def _is_alive(lock: Path, row_age_seconds: float | None) -> bool:
    try:
        holder = msgspec.json.decode(lock.read_bytes())
        pid, host = int(holder["pid"]), str(holder["host"])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        return False
    if host != platform.node():
        return row_age_seconds is None or row_age_seconds < ELSEWHERE_SECONDS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's
    return True
