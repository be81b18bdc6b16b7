"""Learning curves: the loss at marks of a run, the target, and when a run reached it.

All curves of a job have marks after the same numbers of samples, and their losses are those of the model on
the same fixed samples. Neighbouring marks are averaged, because the loss of a single one depends on its last
batches. Knows no torch, and nothing of the contestants.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from w5xde.bench.measure.stats import quotient

# The target is the loss after this part of the plain loop's budget.
TARGET_PART = 0.7
# Marks whose losses are averaged: the mark itself, and its neighbours on both sides.
AVERAGED_MARKS = 5


class CurveMark(msgspec.Struct):
    """A moment of a run: the seconds and samples until then, and the losses of the model."""

    seconds: float
    samples: float
    # On the fixed samples.
    loss: float
    # The mean loss of the batches since the mark before; None: there was none.
    training_loss: float | None = None
    # By the links of all nodes until then, if there are links that count.
    bytes_moved: int = 0


class Curve(msgspec.Struct):
    """The marks of a run, in order, and whether it ended because it seemed to have reached the target."""

    marks: list[CurveMark]
    ended_by_hint: bool = False
    # The whole run, also after the target, and how long a node computed in it; None: not measured.
    seconds: float = 0.0
    seconds_computing: float | None = None

    @property
    def utilisation(self) -> float | None:
        """The share of the time in which a node computed."""
        return quotient(self.seconds_computing, self.seconds)


@dataclass(frozen=True, slots=True)
class Reached:
    """The seconds, samples and bytes on links until a loss was reached."""

    seconds: float
    samples: float
    bytes_moved: float = 0.0


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss averaged with its neighbours, as far as there are any."""
    side = AVERAGED_MARKS // 2
    return [statistics.fmean(losses[max(0, at - side) : at + side + 1]) for at in range(len(losses))]


def _smoothed_within(marks: Sequence[CurveMark], samples: float) -> list[float]:
    """As `smoothed`, but without neighbours that are more than so many samples away."""
    if math.isinf(samples):
        return smoothed([mark.loss for mark in marks])
    side = AVERAGED_MARKS // 2
    return [
        statistics.fmean(
            near.loss
            for near in marks[max(0, at - side) : at + side + 1]
            if abs(near.samples - mark.samples) <= samples
        )
        for at, mark in enumerate(marks)
    ]


def _target_place(marks: Sequence[CurveMark]) -> int:
    wanted = TARGET_PART * marks[-1].samples
    return next(at for at, mark in enumerate(marks) if mark.samples >= wanted)


def target_of(marks: Sequence[CurveMark]) -> float:
    """The loss that the plain loop with these marks has reached after 70 % of its budget."""
    return smoothed([mark.loss for mark in marks])[_target_place(marks)]


def training_loss_at_target(marks: Sequence[CurveMark]) -> float:
    """The training loss of the plain loop with these marks when it reaches the target."""
    place, side = _target_place(marks), AVERAGED_MARKS // 2
    return statistics.fmean(_training_losses(marks[place - side : place + side + 1]))


def seems_reached(marks: Sequence[CurveMark], hint: float | None) -> bool:
    """Whether the newest training losses are below the hint. Costs nothing, and decides only when to end."""
    newest = _training_losses(marks[-AVERAGED_MARKS:])
    return hint is not None and len(newest) == AVERAGED_MARKS and statistics.fmean(newest) < hint


def _training_losses(marks: Sequence[CurveMark]) -> list[float]:
    return [mark.training_loss for mark in marks if mark.training_loss is not None]


def reached(marks: Sequence[CurveMark], target: float, within_samples: float = math.inf) -> Reached | None:
    """When the averaged loss first was at the target, between two marks in proportion; None: never.

    Marks further apart than `within_samples` are not averaged: a run with few of them would seem slower.
    """
    losses = _smoothed_within(marks, within_samples)
    at = next((at for at, loss in enumerate(losses) if loss <= target), None)
    if at is None:
        return None
    later = marks[at]
    if at == 0:
        return Reached(later.seconds, later.samples, later.bytes_moved)
    earlier, part = marks[at - 1], (losses[at - 1] - target) / (losses[at - 1] - losses[at])
    return Reached(
        earlier.seconds + part * (later.seconds - earlier.seconds),
        earlier.samples + part * (later.samples - earlier.samples),
        earlier.bytes_moved + part * (later.bytes_moved - earlier.bytes_moved),
    )


def effective_rate(plain_batches: float, seconds: float | None) -> float | None:
    """Batches that the plain loop needs to the same loss, for each second of ours."""
    return quotient(plain_batches, seconds)


def median(values: Sequence[float | None]) -> float | None:
    """The median; a run that did not reach the target (None) counts as longer than all others."""
    found = statistics.median(math.inf if value is None else value for value in values)
    return found if math.isfinite(found) else None


def speed_ups(bases: Sequence[float | None], seconds: Sequence[float | None]) -> list[float | None]:
    """For each seed, how many times sooner than the base a run was; 0 if it did not reach the target."""
    return [
        None if base is None else 0.0 if own is None else base / own
        for base, own in zip(bases, seconds, strict=True)
    ]


def range_of(values: Sequence[float | None]) -> dict[str, Any]:
    """The median of the known values, and the least and the largest."""
    known = [value for value in values if value is not None]
    if not known:
        return {"median": None, "low": None, "high": None}
    return {"median": statistics.median(known), "low": min(known), "high": max(known)}
