"""Ready-made callbacks: stop a run that does not improve, keep the best weights, note learning rates."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from w5xde.callbacks import Callback
from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.status import RunStatus
from w5xde.errors import UsageError

Mode: TypeAlias = Literal["auto", "min", "max"]
# Parts of the names of metrics that are better the smaller, or the larger, they are.
_SMALLER = ("loss", "error", "perplexity", "ppl", "mse", "mae", "rmse", "nll", "entropy")
_LARGER = ("accuracy", "acc", "f1", "auc", "precision", "recall", "score", "bleu", "iou", "map", "r2")


class _Watching(Callback):
    """Follows one metric, and knows when one value of it is better than another."""

    def __init__(self, metric: str, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        self.metric = metric
        self._is_max = _is_max(metric, mode)
        self._min_delta = abs(min_delta)

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is better by more than `min_delta`; NaN never is."""
        if math.isnan(value):
            return False
        if than is None or math.isnan(than):
            return True
        return value > than + self._min_delta if self._is_max else value < than - self._min_delta


def _is_max(metric: str, mode: Mode) -> bool:
    if mode in ("min", "max"):
        return mode == "max"
    words = metric.lower().replace("-", "_").split("_")
    is_smaller = any(each in metric.lower() if len(each) > 3 else each in words for each in _SMALLER)
    is_larger = any(each in metric.lower() if len(each) > 3 else each in words for each in _LARGER)
    if mode != "auto" or is_smaller == is_larger:
        raise UsageError(
            f"whether {metric!r} is better the smaller or the larger it is cannot be told from its name"
            if mode == "auto"
            else f"mode {mode!r} must be auto, min or max",
            code="W5-260",
            fix=f'say so: EarlyStopping({metric!r}, mode="max"), or mode="min"',
        )
    return is_larger


class EarlyStopping(_Watching):
    """Stops the run when a metric was not better than its best for `patience` evaluations in a row.

    `mode` says whether smaller or larger is better (`"min"`, `"max"`; `"auto"`: by the metric's name), and
    `min_delta` by how much better it must be. Training waits for each evaluation, so that the run stops after
    the same step whichever nodes helped; with `--evaluate skip` it does not wait.
    """

    decides = True

    def __init__(self, metric: str, patience: int, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        super().__init__(metric, mode, min_delta)
        if patience < 1:
            raise UsageError(
                f"patience {patience} must be 1 or more evaluations", code="W5-260", fix="EarlyStopping(…, 3)"
            )
        self.patience = patience
        self.best: float | None = None
        self.best_step: int | None = None
        # Evaluations since the best one.
        self.waited = 0
        # The newest step whose weights were measured.
        self._heard = -1

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        value, step = metrics[self.metric], metrics.step or 0
        if step <= self._heard:
            return  # a run that is resumed may measure a step again
        self._heard = step
        if self.is_better(value, self.best):
            self.best, self.best_step, self.waited = value, metrics.step, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            best = f"{self.best:.4g} of step {self.best_step}" if self.best is not None else "none"
            run.stop(f"{self.metric} was not better than {best} in {self.waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "heard": self._heard,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited, self._heard = state["waited"], state["heard"]


class SaveBest(_Watching):
    """Keeps the weights of the best evaluation as best.safetensors in the folder of the run.

    They are exactly those that were measured. The file replaces the one before atomically; its metadata and
    the summary (`best`) name the step, and `w5xde export --best` writes it elsewhere. A resumed run goes on
    with the best so far. `mode` is that of `EarlyStopping`.
    """

    def __init__(self, metric: str, *, mode: Mode = "auto") -> None:
        super().__init__(metric, mode)

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        known = run.best.value if run.best is not None and run.best.metric == self.metric else None
        if self.is_better(metrics[self.metric], known):
            run.save_best(metrics, self.metric)


class LearningRateMonitor(Callback):
    """Notes the learning rates of the optimizer's groups whenever one of them has changed.

    `history` holds pairs: after how many steps, and the rates from then on. `log(step, rates)` is called with
    each of them, for example to pass them to another program.
    """

    def __init__(self, log: Callable[[int, list[float]], None] | None = None) -> None:
        self.history: list[tuple[int, list[float]]] = []
        self._log = log

    def on_start(self, run: RunStatus) -> None:
        self._note(run.step, run)

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        self._note(step, run)

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        self._note(run.step, run)

    def _note(self, step: int, run: RunStatus) -> None:
        rates = list(run.learning_rates)
        if not self.history or self.history[-1][1] != rates:
            self.history.append((step, rates))
            if self._log is not None:
                self._log(step, rates)


def checked_callbacks(given: Any) -> list[Callback]:
    """The callbacks that a user gave; refuses anything but objects in a list."""
    if isinstance(given, Callback) or not isinstance(given, Iterable):
        raise UsageError(
            f"callbacks is a {type(given).__name__}, not a list of callbacks",
            code="W5-260",
            fix="put brackets around it: callbacks=[…]",
        )
    found = list(given)
    for each in found:
        if isinstance(each, type):
            raise UsageError(
                f"the callback {each.__name__} is a class, not an object",
                code="W5-260",
                fix=f"call it: callbacks=[{each.__name__}(…)]",
            )
        if not isinstance(each, Callback):
            raise UsageError(
                f"a {type(each).__name__} is no callback",
                code="W5-260",
                fix="derive its class from w5xde.Callback",
            )
    return found


def require_metrics(callbacks: Iterable[Callback], metrics: Iterable[str]) -> None:
    """Refuse callbacks that no evaluation of this job can serve, and two that would write one file."""
    callbacks, known = list(callbacks), sorted(metrics)
    for callback in callbacks:
        wanted, name = callback.metric, type(callback).__name__
        if wanted and wanted not in known:
            near = difflib.get_close_matches(wanted, known, n=1)
            there = (
                f"the job's evaluation returns {', '.join(known)}" if known else "the job has no evaluation"
            )
            fix = f"did you mean {near[0]!r}?" if near else "let evaluate(model) return a dict with that name"
            raise UsageError(f"{name} follows {wanted!r}, and {there}", code="W5-261", fix=fix)
    if sum(isinstance(callback, SaveBest) for callback in callbacks) > 1:
        raise UsageError(
            "two SaveBest callbacks would write the same file",
            code="W5-262",
            fix="use one; a callback of your own can write metrics.weights() elsewhere in on_evaluate",
        )
