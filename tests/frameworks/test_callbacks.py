"""Callbacks and loggers of the frameworks, told of a run: what they see, and how they stop it."""

from __future__ import annotations

import csv
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import EarlyStoppingCallback, TrainerCallback

from tests.frameworks import tiny_gpt2
from tests.frameworks.tiny_modules import Images, Normed, images, trainer_arguments
from w5xde import Callback, Evaluation, SaveBest, from_lightning, from_trainer
from w5xde.frameworks.background import WAITING_MAX, Background

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("frameworks")]


@dataclass
class Run:
    """As much of a run's status as these callbacks read."""

    step: int = 0
    epoch: int = 0
    epochs_total: int = 4
    steps_total: int = 8
    seconds: float = 1.0
    learning_rates: list[float] = field(default_factory=lambda: [0.5])
    stopped: list[str] = field(default_factory=list)

    @property
    def learning_rate(self) -> float:
        return self.learning_rates[0]

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


def follow(callbacks: list[Callback], metrics: list[dict[str, float]], run: Run) -> int:
    """Two steps and an evaluation in each epoch, until the run is stopped; how many epochs there were."""
    for each in callbacks:
        each.on_start(run)  # type: ignore[arg-type]
    for epoch, found in enumerate(metrics, 1):
        for step in (2 * epoch - 1, 2 * epoch):
            run.epoch = epoch - (step % 2)
            for each in callbacks:
                each.on_step(run, step, 1 / step)  # type: ignore[arg-type]
        for each in callbacks:
            each.on_evaluate(run, Evaluation(found, 2 * epoch, epoch))  # type: ignore[arg-type]
        if run.stopped:
            break
    for each in callbacks:
        each.on_end(run, {"loss_average": 0.5})  # type: ignore[arg-type]
    return epoch


LOSSES = [{"eval_loss": value, "val_loss": value} for value in (3.0, 2.0, 2.5, 2.6)]


# --- Hugging Face ---------------------------------------------------------------------------------


class Seen(TrainerCallback):
    """Notes what it is told, and on which thread."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, dict[str, float]]] = []
        self.events: list[str] = []
        self.threads: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.rows.append((state.global_step, state.epoch, dict(logs)))
        self.threads.add(threading.current_thread().name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(f"begin {state.max_steps}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(f"epoch {state.epoch:g}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append("end")


class Reported(Seen):
    """As an integration of the Trainer's, which may wait for a server."""


Reported.__module__ = "transformers.integrations.tests"


def test_callbacks_of_the_trainer_see_the_run_and_loggers_do_so_on_a_thread(tmp_path: Path) -> None:
    seen, reported = Seen(), Reported()
    given = {"logging_steps": 2, "_callbacks": [seen, reported]}
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **given))
    assert job.callbacks is not None
    follow(list(job.callbacks()), LOSSES, Run())
    assert seen.rows == reported.rows
    assert seen.rows[:2] == [
        (2, 1.0, {"loss": pytest.approx(0.75), "learning_rate": 0.5, "epoch": 1.0}),
        (2, 1.0, {"eval_loss": 3.0, "val_loss": 3.0, "epoch": 1.0}),
    ]
    assert seen.rows[-1][2]["train_loss"] == 0.5
    assert seen.events == ["begin 8", "epoch 1", "epoch 2", "epoch 3", "epoch 4", "end"] == reported.events
    assert seen.threads == {threading.current_thread().name}
    assert all(name.startswith("w5xde-loggers") for name in reported.threads)


def test_early_stopping_of_the_trainer_stops_the_run(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "_eval_dataset": tiny_gpt2.Texts(),
    }
    run = Run(epochs_total=9, steps_total=18)
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **given, _callbacks=[EarlyStoppingCallback(2)]))
    assert job.callbacks is not None
    (stopping,) = job.callbacks()
    assert stopping.decides
    assert follow([stopping], [*LOSSES, {"eval_loss": 0.0}], run) == 4
    assert run.stopped


def test_a_resumed_run_goes_on_with_the_patience_that_is_left(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "greater_is_better": False,
        "_eval_dataset": tiny_gpt2.Texts(),
    }

    def callback() -> Callback:
        own = {**given, "_callbacks": [EarlyStoppingCallback(3)]}
        job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **own))
        assert job.callbacks is not None
        return next(iter(job.callbacks()))

    first, run = callback(), Run(epochs_total=9, steps_total=18)
    follow([first], LOSSES, run)
    assert run.stopped == []
    second = callback()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (
        follow([second], [{"eval_loss": 2.2}, {"eval_loss": 2.2}], Run(epochs_total=9, steps_total=18)) == 1
    )


def test_the_best_model_is_kept_if_the_trainer_would_load_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "_eval_dataset": tiny_gpt2.Texts(),
    }
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **given))
    assert job.callbacks is not None
    (best,) = [each for each in job.callbacks() if isinstance(each, SaveBest)]
    assert best.metric == "eval_accuracy"
    assert best.is_better(0.6, 0.5)


def test_the_trainers_last_step_does_not_stop_a_run_that_is_over(tmp_path: Path) -> None:
    run = Run()
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path))
    assert job.callbacks is not None
    follow(list(job.callbacks()), [{}] * 4, run)
    assert run.stopped == []


# --- Lightning ------------------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open(encoding="utf-8") as text:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(text)]


def test_loggers_of_lightning_get_hyperparameters_steps_epochs_and_validations(tmp_path: Path) -> None:
    arguments = trainer_arguments(
        logger=CSVLogger(str(tmp_path)),
        log_every_n_steps=2,
        callbacks=[LearningRateMonitor(), ModelCheckpoint()],
    )
    job = from_lightning(lambda: Normed(rate=0.25), Images, trainer=arguments)
    job.loss(job.model(), images()[:4])
    assert job.callbacks is not None
    follow(list(job.callbacks()), LOSSES[:2], Run())
    found = rows(tmp_path)
    assert found[0] == {"epoch": "1", "step": "1", "train_loss": "0.5", "lr": "0.5"}
    assert found[1] == {"epoch": "1", "step": "1", "val_loss": "3.0", "eval_loss": "3.0"}
    assert [int(row["step"]) for row in found] == [1, 1, 3, 3]
    (parameters,) = tmp_path.rglob("hparams.yaml")
    assert parameters.read_text(encoding="utf-8") == "rate: 0.25\n"


def test_early_stopping_of_lightning_stops_the_run_with_its_own_words() -> None:
    run = Run()
    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.1)
    job = from_lightning(Normed, Images, trainer=trainer_arguments(callbacks=stopping))
    assert job.callbacks is not None
    assert follow(list(job.callbacks()), LOSSES, run) == 4
    assert run.stopped == [stopping.stopping_reason_message]
    assert "did not improve in the last 2 records" in run.stopped[0]


def test_early_stopping_of_lightning_keeps_its_state_in_checkpoints() -> None:
    def callback() -> Callback:
        stopping = EarlyStopping("val_loss", patience=3)
        job = from_lightning(Normed, Images, trainer=trainer_arguments(callbacks=[stopping]))
        assert job.callbacks is not None
        return next(iter(job.callbacks()))

    first = callback()
    assert first.decides
    assert first.metric == "val_loss"
    callback().load_state_dict(json.loads(json.dumps(first.state_dict())))
    follow([first], LOSSES, Run())
    second = callback()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert follow([second], [{"val_loss": 2.2}] * 2, Run()) == 1


def test_a_checkpoint_by_a_metric_keeps_the_best_weights() -> None:
    callbacks = [ModelCheckpoint(monitor="accuracy", mode="max"), ModelCheckpoint()]
    job = from_lightning(Normed, Images, trainer=trainer_arguments(callbacks=callbacks))
    assert job.callbacks is not None
    (best,) = job.callbacks()
    assert isinstance(best, SaveBest)
    assert best.metric == "accuracy"


def test_a_threshold_of_early_stopping_counts_too() -> None:
    run = Run()
    stopping = EarlyStopping("val_loss", stopping_threshold=2.2)
    job = from_lightning(Normed, Images, trainer=trainer_arguments(callbacks=[stopping]))
    assert job.callbacks is not None
    assert follow(list(job.callbacks()), LOSSES, run) == 2


def test_what_is_not_called_and_not_sent_is_told_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    job = from_lightning(Normed, Images, trainer=trainer_arguments(callbacks=[Prints()]))
    job.loss(job.model(), images()[:4])
    assert job.callbacks is not None
    list(job.callbacks())
    told = capsys.readouterr().err
    assert "not called, because Lightning's loop does not run: Prints" in told
    assert "logged on nodes alone, and not sent: seen" in told


# --- the thread -----------------------------------------------------------------------------------


def test_a_logger_that_fails_is_heard_of_at_the_next_row() -> None:
    background = Background()

    def fail() -> None:
        raise OSError("no room")

    background.run(fail)
    with pytest.raises(OSError, match="no room"):
        background.close()


def test_rows_for_a_logger_that_is_stuck_are_dropped_and_counted() -> None:
    background, go_on, written = Background(), threading.Event(), []
    background.run(go_on.wait)
    for number in range(WAITING_MAX + 5):
        background.run(lambda n=number: written.append(n))
    go_on.set()
    with pytest.raises(RuntimeError, match="6 rows were dropped"):
        background.close()
    assert written == list(range(WAITING_MAX - 1))
