"""The gradient noise of a run: an estimate of how many batches a step are useful, and the advice from it.

A gradient of one batch is the true gradient plus noise. The mean of K batches has less noise, so that fewer
steps are needed: in proportion to 1 + B/K, where B, the noise in batches, is the variance of the gradients of
batches over the square of the true gradient (McCandlish et al., arXiv 1812.06162). Nodes report the squared
norm of each batch's gradient for some steps, and the coordinator knows that of their mean; both together give
the variance and the square without bias. The noise changes during a run, so only the newest windows of steps
count. Advice only: no decision depends on it, a checkpoint does not keep it, and no bit changes. Knows no
tensors and no nodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from w5xde.config import Settings

# One of so many steps is measured: a node then spends well below 1 % of its time on norms. A large model has
# more parameters for each operation, and its norms take longer.
MEASURED_EVERY = 8
MEASURED_EVERY_IF_LARGE = 16
# Measured steps in a window. The first gradients of a run are many times larger than later ones, and tell
# nothing about the rest: the first window does not count.
WINDOW_STEPS = 16
# The newest windows that count, and how many it takes to say anything.
WINDOWS_KEPT = 4
WINDOWS_MIN = 2
# The true gradient is said to be known if it is this many standard errors away from zero.
CERTAIN_ERRORS = 2.0
# More batches than this are not reported: nobody needs advice to use fewer.
STEP_BATCHES_MAX = 256
# Squared norms from here on are ignored: the squares of smaller ones, and their sums, are finite.
SQUARE_LIMIT = 1e150
# What a gain must be to be mentioned.
GAIN_MIN = 0.05


class PlannedBatches(Protocol):
    """A step of the plan."""

    @property
    def index(self) -> int: ...
    @property
    def apart(self) -> bool: ...
    @property
    def sizes(self) -> Sequence[int]: ...


class _Window(NamedTuple):
    """Sums over the measured steps of a window, or of several."""

    steps: int = 0
    # Estimates of the variance of one batch's gradient, and of the square of the true gradient.
    variance: float = 0.0
    square: float = 0.0
    # The sum of the squares of the latter, for its standard error.
    square_squared: float = 0.0

    def plus(self, other: _Window) -> _Window:
        return _Window(
            self.steps + other.steps,
            self.variance + other.variance,
            self.square + other.square,
            self.square_squared + other.square_squared,
        )


class GradientNoise:
    """Measures the gradient noise of one run; `unknown` says why it cannot be, if it cannot."""

    def __init__(self, step_batches: int, every: int = MEASURED_EVERY, unknown: str = "") -> None:
        self._step_batches = step_batches
        self._every = every
        self.unknown = unknown
        self._window = _Window()
        self._windows: deque[_Window] = deque(maxlen=WINDOWS_KEPT)
        self._is_first = True

    @classmethod
    def of(cls, settings: Settings, *, is_large: bool, weighs: bool = False) -> GradientNoise:
        """The measurement for a run with these settings; `weighs`: its batches weigh more than samples."""
        unknown = ""
        if settings.mode != "sync":
            unknown = f"not measured in {settings.mode} mode, where each node works on steps of its own"
        elif weighs:
            unknown = "not measured with weight=, where the batches of a step weigh differently"
        elif settings.robust != "off":
            unknown = "not measured with --robust, whose mean is not that of all batches"
        elif settings.step_batches == 1:
            unknown = "not measured with one batch a step, which shows no difference between batches"
        elif settings.step_batches > STEP_BATCHES_MAX:
            unknown = f"not measured with more than {STEP_BATCHES_MAX} batches a step"
        return cls(settings.step_batches, MEASURED_EVERY_IF_LARGE if is_large else MEASURED_EVERY, unknown)

    def wants(self, step: PlannedBatches) -> bool:
        """Whether nodes shall report the norms of this step: it is due, and its batches weigh the same."""
        if self.unknown or step.index % self._every or step.apart:
            return False
        return len(step.sizes) == self._step_batches and len(set(step.sizes)) == 1

    def measured(self, squares: Sequence[float], square_of_mean: float) -> None:
        """Take the squared norms of the gradients of a step's batches, and that of their mean.

        Norms that make no sense are ignored: a node reported them.
        """
        count = len(squares)
        if count < 2 or not all(0.0 <= square < SQUARE_LIMIT for square in squares):
            return
        mean = math.fsum(squares) / count
        # By the triangle inequality the norm of a mean is at most the root of the mean of squares.
        if not 0.0 < square_of_mean <= 1.001 * mean:
            return
        square = (count * square_of_mean - mean) / (count - 1)
        variance = (mean - square_of_mean) * count / (count - 1)
        self._window = self._window.plus(_Window(1, variance, square, square * square))
        if self._window.steps == WINDOW_STEPS:
            if not self._is_first:
                self._windows.append(self._window)
            self._is_first = False
            self._window = _Window()

    @property
    def batches(self) -> float | None:
        """The noise in batches, by the newest windows; None if it is not known."""
        if len(self._windows) < WINDOWS_MIN:
            return None
        total = _Window()
        for window in self._windows:
            total = total.plus(window)
        square = total.square / total.steps
        deviation = total.square_squared / total.steps - square * square
        error = math.sqrt(max(0.0, deviation) / total.steps)
        if square <= CERTAIN_ERRORS * error:
            return None
        found = max(0.0, total.variance / total.steps) / square
        return found if found < math.inf else None

    def text(self, nodes: int, at_once: int) -> str:
        """A sentence for the user; `at_once` of the nodes can compute at a time."""
        found = self.batches
        if self.unknown or found is None:
            why = self.unknown or "not known yet, or too large to be measured"
            return f"gradient noise: {why}"
        return noise_text(found, self._step_batches, nodes, at_once)


def noise_text(noise: float, step_batches: int, nodes: int, at_once: int) -> str:
    """What a noise of so many batches means for a run, in one sentence.

    Time is modelled as (1 + noise/K) steps, each of ⌈K/n⌉ batches one after another; sending costs nothing.
    """
    useful = max(1, _rounded(noise))
    text = f"gradient noise, an estimate: up to about {_batches(useful)} a step {_be(useful)} useful"
    if useful > 1:
        text += ", if as many nodes share them"
    if not at_once:
        return text
    best = _model_seconds(noise, at_once, at_once)
    now = _model_seconds(noise, step_batches, at_once)
    pool = _nodes(at_once) + (" at a time" if at_once < nodes else "")
    text += f"; for {pool} {_batches(at_once)} a step {_be(at_once)} best"
    if step_batches == at_once:
        text += ", as now"
    else:
        text += f", and {step_batches:,} {_be(step_batches)} at {100 * best / now:.0f} % of that"
    more = 2 * at_once
    # Steps that are too short for all of them would be made longer.
    soon = min(_model_seconds(noise, step_batches, more), _model_seconds(noise, more, more))
    gain = best / soon - 1.0
    if gain < GAIN_MIN:
        return f"{text}; more nodes would gain little"
    core = "a core of its own" if at_once == 1 else "cores of their own"
    more_nodes = f"{at_once:,} more {'node' if at_once == 1 else 'nodes'} with {core}"
    return f"{text}; {more_nodes} would gain about {_rounded(100 * gain)} %"


def _model_seconds(noise: float, step_batches: int, nodes: int) -> float:
    """Seconds to a loss, in units that cancel out."""
    return (1.0 + noise / step_batches) * -(-step_batches // nodes)


def _rounded(number: float) -> int:
    """A number with two digits that count, because an estimate has no more."""
    if number < 100:
        return round(number)
    return int(float(f"{number:.1e}"))


def _batches(count: int) -> str:
    return f"{count:,} {'batch' if count == 1 else 'batches'}"


def _nodes(count: int) -> str:
    return f"{count:,} {'node' if count == 1 else 'nodes'}"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"
