"""The points of a run's charts: at most as many as a chart can show, however many rows there are.

Neighbours are merged: the band of losses keeps its extremes, means stay means, and everything else is that of
the later row. Steps that a crash made void are left out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from w5xde.follow.rows import MetricsRow

POINTS_MAX = 2000

# What a point consists of, in this order: one column each.
COLUMNS = ("time", "life", "step", "samples", "seconds", "loss", "low", "high", "rate", "durable", "load")
Point = tuple[float, int, int, int, float, float | None, float | None, float | None, float, int, float]


def point_of(row: MetricsRow) -> Point:
    """The point of one row."""
    low = row.loss_min if row.loss_min is not None else row.loss
    high = row.loss_max if row.loss_max is not None else row.loss
    return (
        row.time,
        row.life,
        row.step,
        row.samples,
        row.seconds,
        row.loss,
        low,
        high,
        row.samples_per_second,
        row.durable_steps,
        row.load,
    )


class ChartPoints:
    """The points of one run, oldest first."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        # How many rows a whole point stands for, and how many the last one does.
        self._stride = 1
        self._filled = 0
        # (step, metrics) of each evaluation, and (life, step at which it began) of each life after the first.
        self.evaluations: list[tuple[int, dict[str, float | None]]] = []
        self.lives: list[tuple[int, int]] = []

    def add(self, row: MetricsRow) -> None:
        """Add the next row."""
        point = point_of(row)
        if self._points and row.life != self._points[-1][1]:
            self._begin_life(row)
        self._note_evaluation(row)
        if self._points and 0 < self._filled < self._stride:
            self._points[-1] = _merged(self._points[-1], point, self._filled)
            self._filled += 1
            return
        if len(self._points) >= POINTS_MAX:
            self._halve()
        self._points.append(point)
        self._filled = 1

    def _begin_life(self, row: MetricsRow) -> None:
        """Leave out what the new life of the coordinator does again."""
        self.lives.append((row.life, row.step))
        while self._points and self._points[-1][2] > row.step:
            self._points.pop()
        self.evaluations = [each for each in self.evaluations if each[0] <= row.step]
        self._filled = 0

    def _note_evaluation(self, row: MetricsRow) -> None:
        if row.evaluation and row.evaluation_step is not None:
            if self.evaluations and self.evaluations[-1][0] == row.evaluation_step:
                return
            self.evaluations.append((row.evaluation_step, dict(row.evaluation)))
            if len(self.evaluations) > POINTS_MAX:
                del self.evaluations[::2]

    def _halve(self) -> None:
        points = self._points
        self._points = [_merged(points[at], points[at + 1], 1) for at in range(0, len(points) - 1, 2)]
        self._stride *= 2

    def columns(self) -> dict[str, list[float | int | None]]:
        """The points by column, as charts take them."""
        by_column: Iterator[tuple[float | int | None, ...]] = zip(*self._points, strict=True)
        found = {name: list(values) for name, values in zip(COLUMNS, by_column, strict=False)}
        return found or {name: [] for name in COLUMNS}

    def __len__(self) -> int:
        return len(self._points)


def _merged(first: Point, last: Point, weight: int) -> Point:
    """One point in place of two neighbours, the first of which stands for `weight` rows."""
    lows = [low for low in (first[6], last[6]) if low is not None]
    highs = [high for high in (first[7], last[7]) if high is not None]
    loss = last[5] if first[5] is None else first[5]
    if first[5] is not None and last[5] is not None:
        loss = (first[5] * weight + last[5]) / (weight + 1)
    rate = (first[8] * weight + last[8]) / (weight + 1)
    load = (first[10] * weight + last[10]) / (weight + 1)
    low, high = min(lows, default=None), max(highs, default=None)
    return (*last[:5], loss, low, high, rate, last[9], load)
