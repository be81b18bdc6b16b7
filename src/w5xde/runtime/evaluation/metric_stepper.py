"""Steps a schedule by the metric of each evaluation, where the learner lives. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from w5xde.callbacks.evaluation import Evaluation
from w5xde.learn.step.learner import Learner
from w5xde.runtime.system.actor import Actor


class MetricStepper:
    """Passes one metric of each evaluation to the schedule of a learner."""

    def __init__(self, learner: Learner, actor: Actor, metric: str) -> None:
        self._learner = learner
        self._actor = actor
        self._metric = metric

    def step(self, evaluation: Evaluation, done: Callable[[list[float]], None]) -> None:
        """Step the schedule; `done` gets the learning rates, on the loop."""
        step, value = evaluation.step or 0, evaluation[self._metric]
        self._actor.call(lambda: self._learner.measured(step, value), done)
