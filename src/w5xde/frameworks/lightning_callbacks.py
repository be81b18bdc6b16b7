"""The callbacks and loggers of a Lightning Trainer, told of a run that the Trainer does not train.

Early stopping is decided by Lightning's own callback. Loggers run on a thread of their own. Callbacks that
would change the training are refused, all others are named. Knows nothing of how the run trains.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from w5xde.callbacks import Callback
from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.ready import SaveBest
from w5xde.callbacks.status import RunStatus
from w5xde.errors import JobError
from w5xde.frameworks.background import Background
from w5xde.frameworks.lightning_arguments import LightningArguments
from w5xde.frameworks.lightning_trainer import LogBook
from w5xde.frameworks.refusals import LIGHTNING_CALLBACKS, LIGHTNING_HOOKS, overridden, refuse_hooks

# Callbacks whose work a run does itself, or that only draw on the screen.
_REPLACED = {
    "DeviceStatsMonitor", "ModelSummary", "ProgressBar", "RichModelSummary",
    "RichProgressBar", "ThroughputMonitor", "Timer", "TQDMProgressBar",
}  # fmt: skip


class LoggerRows(Callback):
    """Writes rows of metrics to Lightning's loggers: of steps, of epochs and of evaluations.

    A row has the number of the step before it, as Lightning counts.
    """

    def __init__(self, arguments: LightningArguments, module: Any, book: LogBook, rates: bool) -> None:
        self._loggers = arguments.loggers
        self._every = arguments.log_every_steps
        self._hyperparameters = dict(getattr(module, "hparams_initial", None) or {})
        self._book = book
        self._writes_rates = rates
        self._background = Background()
        self._epoch_losses: list[float] = []
        self._epochs = 0

    def on_start(self, run: RunStatus) -> None:
        self._epochs = run.epoch
        if self._hyperparameters:
            self._write("log_hyperparams", self._hyperparameters)

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        self._epoch_losses.append(loss)
        if step % self._every == 0:
            rates = _named_rates(run) if self._writes_rates else {}
            self._row({**self._losses(loss, by_epoch=False), **rates}, run, step)
        if run.epoch > self._epochs:
            self._epochs = run.epoch
            mean = sum(self._epoch_losses) / len(self._epoch_losses)
            self._row(self._losses(mean, by_epoch=True), run, step)
            self._epoch_losses = []

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        self._row(dict(metrics), run, metrics.step or 0)

    def on_end(self, run: RunStatus, summary: dict[str, Any]) -> None:
        self._write("save")
        self._write("finalize", "success")
        self._background.close()

    def _losses(self, loss: float, *, by_epoch: bool) -> dict[str, float]:
        """The loss under the names with which `training_step` logs it."""
        names = [how.names(name)[by_epoch] for name, how in self._book.losses.items()]
        return {name: loss for name in names if name}

    def _row(self, metrics: dict[str, float], run: RunStatus, step: int) -> None:
        if metrics:
            self._write("log_metrics", {**metrics, "epoch": run.epoch}, step - 1)

    def _write(self, method: str, *arguments: Any) -> None:
        for logger in self._loggers:
            self._background.run(lambda each=logger: getattr(each, method)(*arguments))  # type: ignore[misc]


def _named_rates(run: RunStatus) -> dict[str, float]:
    rates = run.learning_rates
    if len(rates) == 1:
        return {"lr": rates[0]}
    return {f"lr/pg{number}": rate for number, rate in enumerate(rates, 1)}


class LightningEarlyStopping(Callback):
    """Lets Lightning's EarlyStopping look at every evaluation, and stops the run when it says so."""

    decides = True

    def __init__(self, stopping: Any, library: ModuleType) -> None:
        self._stopping = stopping
        self.metric = stopping.monitor if stopping.strict else ""
        # As much of a trainer as the callback looks at; not by epochs, but after each validation.
        fitting = sys.modules[f"{library.__name__}.trainer.states"].TrainerFn.FITTING
        self._seen = SimpleNamespace(
            state=SimpleNamespace(fn=fitting),
            strategy=SimpleNamespace(reduce_boolean_decision=lambda decision, all=True: decision),  # noqa: A006
            sanity_checking=False,
            fast_dev_run=False,
            should_stop=False,
            world_size=1,
            global_rank=0,
            current_epoch=0,
            val_check_interval=1,
            check_val_every_n_epoch=None,
            callback_metrics={},
        )
        stopping.setup(self._seen, None, "fit")

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        seen = self._seen
        seen.current_epoch = metrics.epoch
        seen.callback_metrics = {name: torch.tensor(value) for name, value in metrics.items()}
        # The one that it does not use returns at once.
        self._stopping.on_validation_end(seen, None)
        self._stopping.on_train_epoch_end(seen, None)
        if seen.should_stop:
            run.stop(self._stopping.stopping_reason_message or f"{self._stopping.monitor} stopped improving")

    def state_dict(self) -> dict[str, Any]:
        best = float(self._stopping.best_score)
        # Infinite until the first evaluation.
        return {
            "wait_count": self._stopping.wait_count,
            "best_score": best if math.isfinite(best) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stopping.wait_count = state["wait_count"]
        if state["best_score"] is not None:
            self._stopping.best_score = torch.tensor(float(state["best_score"]))


def make_callbacks(
    arguments: LightningArguments, module: Any, library: ModuleType, book: LogBook
) -> Iterable[Callback]:
    """The callbacks of a run that do the work of the Trainer's callbacks and loggers."""
    given = sorted_callbacks(arguments.callbacks, library)
    if arguments.loggers:
        yield LoggerRows(arguments, module, book, rates=bool(given["LearningRateMonitor"]))
    for stopping in given["EarlyStopping"]:
        yield LightningEarlyStopping(stopping, library)
    best = [each for each in given["ModelCheckpoint"] if each.monitor is not None]
    for checkpoint in best[:1]:
        yield SaveBest(checkpoint.monitor, mode=checkpoint.mode)
    given["other"] += best[1:]
    if given["other"]:
        names = ", ".join(type(each).__name__ for each in given["other"])
        print(f"not called, because Lightning's loop does not run: {names}", file=sys.stderr, flush=True)
    if book.dropped:
        names = ", ".join(sorted(book.dropped))
        print(f"logged on nodes alone, and not sent: {names}", file=sys.stderr, flush=True)


def sorted_callbacks(given: Iterable[Any], library: ModuleType) -> dict[str, list[Any]]:
    """Callbacks by what becomes of them; JobError for those that would change the training."""
    kinds = ("EarlyStopping", "LearningRateMonitor", "ModelCheckpoint", "other")
    found: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for each in given:
        names = [kind.__name__ for kind in type(each).__mro__]
        refused = next((name for name in names if name in LIGHTNING_CALLBACKS), None)
        if refused is not None:
            raise JobError(
                f"Lightning's callback {type(each).__name__} cannot be used here",
                code="W5-293",
                why=LIGHTNING_CALLBACKS[refused],
                fix="leave it out",
            )
        kind = next((name for name in names if name in found or name in _REPLACED), "other")
        if kind == "other" and (hooks := overridden(each, library.Callback, _CHANGING)):
            raise refuse_hooks(each, LIGHTNING_HOOKS, hooks)
        if kind in found:
            found[kind].append(each)
    return found


# Hooks in which a callback can change what is trained.
_CHANGING = (
    "on_after_backward", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad",
    "on_train_batch_start",
)  # fmt: skip
