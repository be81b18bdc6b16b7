"""The moments of the steps of a run, as a file, and the figures that follow from them.

A line holds the number of a step, the moment when it had been applied (seconds since the epoch, because
several processes write and read it), and how many workers were at work. A run that is set back to a
checkpoint repeats numbers. Knows nothing of what is trained, and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StepMoment:
    """One line: a step, when it had been applied, and the workers that were at work."""

    step: int
    at: float
    workers: int

    def line(self) -> str:
        return f"{self.step} {self.at:.6f} {self.workers}\n"


class StepReader:
    """Reads a file of moments while it is written; a line that is not complete yet is read the next time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self.moments: list[StepMoment] = []

    def read(self) -> list[StepMoment]:
        """All moments so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._place)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._place += len(whole)
            for line in whole.decode("ascii").splitlines():
                step, at, workers = line.split()
                self.moments.append(StepMoment(int(step), float(at), int(workers)))
        return self.moments


def complete_at(moments: Sequence[StepMoment], workers: int) -> float | None:
    """When this many workers were first at work; None if they never were."""
    return next((each.at for each in moments if each.workers >= workers), None)


@dataclass(frozen=True, slots=True)
class StepPace:
    """Steps between two steps of a run, and the seconds from the one to the other."""

    steps: int
    seconds: float


def pace_between(moments: Sequence[StepMoment], begin: float, end: float) -> StepPace:
    """The steps from the first to the last one within two moments, so that no long step is cut."""
    within = [each.at for each in moments if begin <= each.at <= end]
    return StepPace(len(within) - 1, within[-1] - within[0]) if len(within) > 1 else StepPace(0, 0.0)


@dataclass(frozen=True, slots=True)
class Outage:
    """What the loss of a worker cost a run. None: no step was made, or no new one, before the run ended."""

    # The longest time between two steps, of which the later one came after the loss.
    seconds_without_step: float | None
    # From the loss to the first step that the run had not made before.
    seconds_behind: float | None
    # Steps that were made, and made again.
    steps_again: int


def outage_after(moments: Sequence[StepMoment], lost_at: float) -> Outage:
    """What a run did after it had lost a worker at this moment."""
    gaps = [later.at - one.at for one, later in pairwise(moments) if later.at > lost_at]
    furthest = max((each.step for each in moments if each.at <= lost_at), default=0)
    beyond = next((each.at for each in moments if each.at > lost_at and each.step > furthest), None)
    steps = [each.step for each in moments]
    return Outage(
        max(gaps, default=None),
        beyond - lost_at if beyond is not None else None,
        len(steps) - len(set(steps)),
    )
