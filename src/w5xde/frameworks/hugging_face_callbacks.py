"""The callbacks and loggers of a Hugging Face Trainer, told of a run that the Trainer does not train.

They get the Trainer's own state, which follows the run, and may stop it. Loggers (`report_to`) run on a
thread of their own. The best weights are kept by `SaveBest`. Knows nothing of how the run trains.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from w5xde.callbacks import Callback
from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.ready import SaveBest
from w5xde.callbacks.status import RunStatus
from w5xde.frameworks.background import Background

_INTEGRATIONS = "transformers.integrations"


def make_callbacks(trainer: Any, trained: Callable[[], nn.Module]) -> Iterator[Callback]:
    """The callbacks of a run that do the work of the Trainer's; `trained` gives the model of the run."""
    yield TrainerCallbacks(trainer, trained)
    if trainer.args.load_best_model_at_end:
        yield SaveBest(_best_metric(trainer.args), mode="max" if trainer.args.greater_is_better else "min")


def _best_metric(arguments: Any) -> str:
    return f"eval_{arguments.metric_for_best_model.removeprefix('eval_')}"


class TrainerCallbacks(Callback):
    """Calls the Trainer's callbacks when a run starts, steps, evaluates and ends."""

    def __init__(self, trainer: Any, trained: Callable[[], nn.Module]) -> None:
        """`trained` gives the model that the run trains."""
        from transformers.trainer_callback import (
            PrinterCallback,
            ProgressCallback,
            TrainerCallback,
            TrainerControl,
        )

        self._trainer = trainer
        self._trained = trained
        self._control = TrainerControl()
        self._background = Background()
        self._losses: list[float] = []
        self._epochs = 0
        handler = trainer.callback_handler
        # A run has a view of its own.
        bars = (PrinterCallback, ProgressCallback)
        shown = [each for each in handler.callbacks if not isinstance(each, bars)]
        loggers = [each for each in shown if type(each).__module__.startswith(_INTEGRATIONS)]
        handler.callbacks = [each for each in shown if each not in loggers]
        self._loggers = copy.copy(handler)
        self._loggers.callbacks = loggers
        # One that hears of evaluations may stop the run, which must end at the same step each time.
        self.decides = any(
            type(each).on_evaluate is not TrainerCallback.on_evaluate for each in handler.callbacks
        )
        self._best: tuple[float | None, int | None] = (None, None)

    def on_start(self, run: RunStatus) -> None:
        from transformers.trainer_callback import TrainerState

        state = self._trainer.state = TrainerState()
        state.max_steps = run.steps_total or sys.maxsize
        state.num_train_epochs = run.epochs_total or sys.maxsize
        state.compute_steps(self._trainer.args, state.max_steps)
        state.global_step, state.epoch = run.step, _epoch(run, run.step)
        state.best_metric, state.best_global_step = self._best
        self._epochs = math.floor(state.epoch)
        self._trainer.callback_handler.model = self._loggers.model = self._trained()
        self._tell("on_train_begin")
        self._tell("on_epoch_begin")

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        state = self._trainer.state
        state.global_step = step
        state.epoch = _epoch(run, step)
        self._losses.append(loss)
        self._tell("on_step_begin")
        self._tell("on_step_end")
        self._log_if_due(run)
        if math.floor(state.epoch) > self._epochs:
            self._epochs = math.floor(state.epoch)
            self._tell("on_epoch_end")
            self._log_if_due(run)
            self._tell("on_epoch_begin")
        if step >= state.max_steps:
            # The end that was planned, of which the Trainer's own callback tells.
            self._control.should_training_stop = False
        self._stop_if_asked(run)

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        state = self._trainer.state
        before = state.global_step, state.epoch
        # The evaluation may be of earlier weights.
        state.global_step, state.epoch = metrics.step, _epoch(run, metrics.step or 0)
        self._log(dict(metrics))
        self._tell("on_evaluate", metrics=dict(metrics))
        self._note_best(metrics)
        state.global_step, state.epoch = before
        self._stop_if_asked(run)

    def on_end(self, run: RunStatus, summary: dict[str, Any]) -> None:
        trainer = self._trainer
        if summary.get("loss_average") is not None:
            self._log({"train_loss": summary["loss_average"], "train_runtime": run.seconds})
        strategy = trainer.args.save_strategy
        if str(getattr(strategy, "value", strategy)) != "no" and summary.get("weights_step"):
            trainer.model = _with_own_memory(self._trained())
            trainer.save_model()
        self._tell("on_train_end")
        self._background.close()

    # --- what a checkpoint keeps ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        own = {type(each).__name__: each.state() for each in self._stateful()}
        return {"best": list(self._best), "callbacks": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best, step = state["best"]
        self._best = (best, step)
        for each in self._stateful():
            kept = state["callbacks"].get(type(each).__name__, {})
            for name, value in kept.get("attributes", {}).items():
                setattr(each, name, value)

    def _stateful(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]

    # --- what callbacks are told ------------------------------------------------------------------

    def _tell(self, event: str, **more: Any) -> None:
        trainer = self._trainer
        arguments, handler = trainer.args, trainer.callback_handler
        self._control = getattr(handler, event)(arguments, trainer.state, self._control, **more)
        if self._loggers.callbacks:
            # Copies: the run goes on.
            state, control = copy.copy(trainer.state), copy.copy(self._control)
            self._background.run(lambda: getattr(self._loggers, event)(arguments, state, control, **more))

    def _log_if_due(self, run: RunStatus) -> None:
        if self._control.should_log and self._losses:
            rate = {} if run.learning_rate is None else {"learning_rate": run.learning_rate}
            self._log({"loss": sum(self._losses) / len(self._losses), **rate})
            self._losses = []
        self._control.should_log = False

    def _log(self, logs: dict[str, float]) -> None:
        self._trainer.log(logs)
        if self._loggers.callbacks:
            state, control = copy.copy(self._trainer.state), copy.copy(self._control)
            arguments, own = self._trainer.args, dict(logs)
            self._background.run(lambda: self._loggers.on_log(arguments, state, control, own))

    def _note_best(self, metrics: Evaluation) -> None:
        """As the Trainer does: early stopping compares with the best value before."""
        arguments, state = self._trainer.args, self._trainer.state
        if arguments.metric_for_best_model is None:
            return
        value, best = metrics.get(_best_metric(arguments)), state.best_metric
        if value is None:
            return
        if best is None or (value > best if arguments.greater_is_better else value < best):
            self._best = state.best_metric, state.best_global_step = value, metrics.step

    def _stop_if_asked(self, run: RunStatus) -> None:
        if self._control.should_training_stop:
            run.stop("a callback of the Trainer asked for it")


def _epoch(run: RunStatus, step: int) -> float:
    """The epochs that are done after a step, as the Trainer counts them."""
    if run.steps_total and run.epochs_total:
        return float(step * run.epochs_total / run.steps_total)
    return float(run.epoch)


def _with_own_memory(module: nn.Module) -> nn.Module:
    """A copy of a model whose tensors do not lie in one piece of memory: saving would call them shared."""
    separate = copy.deepcopy(module)
    for tensor in [*separate.parameters(), *separate.buffers()]:
        tensor.data = tensor.data.clone()
    return separate
