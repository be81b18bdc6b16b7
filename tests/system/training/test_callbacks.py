"""What callbacks may do with a run: stop it, read its weights, keep the best, note its learning rates."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import w5xde
from tests.processes import AtStep, events
from tests.system import jobs
from tests.system.training.counters import (
    EPOCH_STEPS,
    EPOCHS,
    SETTINGS,
    Heard,
    StepCounter,
    counted,
    counting,
    steps_of,
)
from w5xde.cli.main import main
from w5xde.learn.model.digest import tensors_sha256

# Of a run of six epochs with four steps each.
SCORES = {4: 0.5, 8: 0.7, 12: 0.9, 16: 0.8, 20: 0.8, 24: 0.7}


def scored(net: nn.Module) -> dict[str, float]:
    """An evaluation whose best result is that of the third epoch."""
    return {"accuracy": SCORES.get(round(steps_of(net)), 0.0), "steps": steps_of(net)}


def train(job: w5xde.Job | str, folder: Path, *callbacks: w5xde.Callback, **settings: Any) -> w5xde.Result:
    return w5xde.train(job, runs=str(folder), callbacks=callbacks, **SETTINGS | settings)


def audit(folder: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    status = main(["audit", str(folder), "--json"])
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert (status, found["violations"]) == (0, [])
    return found


# --- stopping -------------------------------------------------------------------------------------


def test_a_callback_stops_the_run_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stop = AtStep({7: lambda run: run.stop("it is good enough")})
    result = train(counting(counted), tmp_path, stop)
    # The step that had begun was completed.
    assert result.summary["steps"] == result.summary["durable_steps"] == 8
    assert result.reason == result.summary["reason"] == "stopped by a callback: it is good enough"
    assert result.summary["weights_step"] == 8
    assert audit(result.folder, capfd)["ended"] == result.reason
    resumed = w5xde.train(counting(counted), resume=result.folder.name, runs=str(tmp_path))
    assert (resumed.summary["steps"], resumed.reason) == (EPOCHS * EPOCH_STEPS, "all steps done")


def test_a_callback_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    class Never(w5xde.Callback):
        def on_start(self, run: w5xde.RunStatus) -> None:
            run.stop()

    result = train(counting(counted), tmp_path, Never())
    assert (result.summary["steps"], result.reason) == (0, "stopped by a callback")


def test_a_reason_does_not_pass_for_the_end_of_the_plan(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = train(counting(counted), tmp_path, AtStep({3: lambda run: run.stop("all steps done")}))
    assert result.summary["steps"] == 4
    audit(result.folder, capfd)


def test_a_thread_of_a_callback_may_stop_the_run(tmp_path: Path) -> None:
    class Elsewhere(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            if step == 3:
                threading.Thread(target=run.stop, args=["said elsewhere"]).start()

    result = train(counting(counted), tmp_path, Elsewhere(), epochs=100_000)
    assert result.reason == "stopped by a callback: said elsewhere"


# --- early stopping -------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_early_stopping_ends_after_the_same_step_whichever_nodes_helped(tmp_path: Path, nodes: int) -> None:
    stopping = w5xde.EarlyStopping("accuracy", patience=2)
    heard = Heard()
    result = train(counting(scored), tmp_path, stopping, heard, nodes=nodes)
    assert result.summary["steps"] == result.summary["weights_step"] == 20
    assert heard.steps == [4, 8, 12, 16, 20]
    expected = "accuracy was not better than 0.9 of step 12 in 2 evaluations"
    assert result.reason == f"stopped by a callback: {expected}"
    # Training waited for each result: none was heard after another step.
    assert all(step == at for step, _, _, at in heard.evaluations)


def test_early_stopping_goes_on_counting_when_the_run_is_resumed(tmp_path: Path) -> None:
    stop = AtStep({17: lambda run: run.stop("for now")})
    first = train(counting(scored), tmp_path, w5xde.EarlyStopping("accuracy", 2), stop)
    assert first.summary["steps"] == 18
    stopping = w5xde.EarlyStopping("accuracy", 2)
    run = first.folder.name
    result = w5xde.train(counting(scored), resume=run, runs=str(tmp_path), callbacks=[stopping])
    assert (stopping.best, stopping.best_step, stopping.waited) == (0.9, 12, 2)
    assert result.summary["steps"] == 20


@pytest.mark.parametrize(
    ("metric", "mode", "worse", "better"),
    [
        ("loss", "auto", 2.0, 1.0),
        ("val_acc", "auto", 1.0, 2.0),
        ("top5-accuracy", "auto", 1.0, 2.0),
        ("speed", "max", 1.0, 2.0),
        ("loss", "max", 1.0, 2.0),
        ("wer", "min", 2.0, 1.0),
        ("loss", "auto", float("nan"), 1.0),
    ],
)
def test_which_value_is_better(metric: str, mode: Any, worse: float, better: float) -> None:
    stopping = w5xde.EarlyStopping(metric, 1, mode=mode)
    assert stopping.is_better(better, worse)
    assert not stopping.is_better(worse, better)
    assert not stopping.is_better(better, better)
    assert stopping.is_better(better, None)
    assert not w5xde.EarlyStopping(metric, 1, mode=mode, min_delta=1.5).is_better(better, 1.5)


def test_a_metric_whose_name_says_nothing_needs_a_mode() -> None:
    for wrong in (
        lambda: w5xde.SaveBest("speed"),
        lambda: w5xde.SaveBest("loss_accuracy"),
        lambda: w5xde.EarlyStopping("loss", 1, mode="less"),  # type: ignore[arg-type]
        lambda: w5xde.EarlyStopping("loss", 0),
    ):
        with pytest.raises(w5xde.UsageError) as caught:
            wrong()
        assert caught.value.code == "W5-260"


def test_a_callback_that_no_evaluation_serves_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(w5xde.UsageError, match=r"follows 'acuracy', and the .* returns accuracy") as no:
        train(counting(scored), tmp_path, w5xde.EarlyStopping("acuracy", 2, mode="max"))
    assert (no.value.code, no.value.fix) == ("W5-261", "did you mean 'accuracy'?")
    with pytest.raises(w5xde.UsageError, match="the job has no evaluation"):
        train(jobs.job, tmp_path, w5xde.SaveBest("loss"))
    with pytest.raises(w5xde.UsageError) as twice:
        train(counting(scored), tmp_path, w5xde.SaveBest("accuracy"), w5xde.SaveBest("steps", mode="max"))
    assert twice.value.code == "W5-262"
    assert list(tmp_path.iterdir()) == []


# --- reading weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_large", [False, True])
def test_weights_are_those_of_their_step_and_reading_them_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr("w5xde.learn.model.route.LARGE_BYTES_MIN", 0)
    plain = w5xde.train(jobs.job, nodes=2, epochs=3, runs=str(tmp_path))
    read: list[w5xde.Weights] = []

    class Reader(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            run.weights(read.append)

        def on_end(self, run: w5xde.RunStatus, summary: dict[str, Any]) -> None:
            run.weights(read.append)

    result = w5xde.train(jobs.job, nodes=2, epochs=3, runs=str(tmp_path), callbacks=[Reader()])
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    steps = result.summary["steps"]
    assert [weights.step for weights in read] == [*range(1, steps + 1), steps]
    assert read[-1].epoch == 3
    assert tensors_sha256(read[-1].values()) == tensors_sha256(read[-2].values())
    assert tensors_sha256(read[-1].values()) == result.summary["weights_sha256"]
    assert len({tensors_sha256(weights.values()) for weights in read}) == steps
    jobs.model().load_state_dict(read[0])


def test_weights_that_a_callback_spoils_are_not_those_of_the_training(tmp_path: Path) -> None:
    def spoil(weights: w5xde.Weights) -> None:
        for tensor in weights.values():
            tensor.fill_(7)

    class Spoiler(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            run.weights(spoil)

        def on_evaluate(self, run: w5xde.RunStatus, metrics: w5xde.Evaluation) -> None:
            spoil(metrics.weights())

    result = train(counting(counted), tmp_path, Spoiler())
    assert steps_of(result.model) == EPOCHS * EPOCH_STEPS


def test_a_function_that_fails_on_weights_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w5xde.learn.model.route.LARGE_BYTES_MIN", 0)

    def fail(weights: w5xde.Weights) -> None:
        raise ValueError(f"not of step {weights.step}")

    result = train(counting(counted), tmp_path, AtStep({3: lambda run: run.weights(fail)}))
    assert result.summary["steps"] == EPOCHS * EPOCH_STEPS
    [text] = [each["text"] for each in events(result.folder) if each["kind"] == "callback failed"]
    assert "not of step 3 (test_callbacks.py" in text
    assert text in capfd.readouterr().err


def test_measured_weights_can_be_read_only_while_their_result_is_told(tmp_path: Path) -> None:
    kept: list[w5xde.Evaluation] = []

    class Keeper(w5xde.Callback):
        def on_evaluate(self, run: w5xde.RunStatus, metrics: w5xde.Evaluation) -> None:
            assert float(metrics.weights()["steps"]) == metrics.step == metrics.weights().step
            kept.append(metrics)

    train(counting(counted), tmp_path, Keeper())
    assert len(kept) == EPOCHS
    with pytest.raises(RuntimeError, match="only while on_evaluate runs"):
        kept[0].weights()


def test_a_status_of_no_run_cannot_be_stopped() -> None:
    with pytest.raises(RuntimeError, match="only shows a run"):
        w5xde.RunStatus("mine", "sync", "", 1).stop()


# --- the best -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_large", [False, True])
def test_the_best_weights_are_kept_exactly_as_they_were_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr("w5xde.learn.model.route.LARGE_BYTES_MIN", 0)
    result = train(counting(scored), tmp_path, w5xde.SaveBest("accuracy"))
    assert result.summary["steps"] == EPOCHS * EPOCH_STEPS
    best = result.folder / "best.safetensors"
    assert {name: float(each) for name, each in load_file(best).items()} == {"steps": 12.0}
    with safe_open(best, framework="pt") as file:
        told = file.metadata()
    assert (told["step"], told["epoch"], told["metric"], told["value"]) == ("12", "3", "accuracy", "0.9")
    expected = {"file": "best.safetensors", "step": 12, "epoch": 3, "metric": "accuracy", "value": 0.9}
    assert result.summary["best"] == expected
    assert audit(result.folder, capfd)["best_step"] == 12
    assert [path.name for path in result.folder.glob("*.tmp")] == []
    for kind in ("safetensors", "pt"):
        target = tmp_path / f"best.{kind}"
        words = ["export", str(result.folder), "--best", "--to", kind, "--out", str(target), "--json"]
        assert main(words) == 0
        written = json.loads(capfd.readouterr().out)
        assert (written["steps"], written["metric"], written["value"]) == (12, "accuracy", 0.9)
        exported = load_file(target) if kind == "safetensors" else torch.load(target, weights_only=True)
        assert written["weights_sha256"] == tensors_sha256(exported.values())
        net = StepCounter()
        net.load_state_dict(exported)
        assert steps_of(net) == 12
    with best.open("r+b") as other:
        other.seek(-1, 2)
        other.write(b"\x01")
    assert main(["audit", str(result.folder), "--json"]) == 1
    assert "best.safetensors is none of those that the run saved" in capfd.readouterr().out


def test_the_last_evaluation_may_be_the_best(tmp_path: Path) -> None:
    result = train(counting(counted), tmp_path, w5xde.SaveBest("steps", mode="max"))
    assert result.summary["best"]["step"] == EPOCHS * EPOCH_STEPS
    best = load_file(result.folder / "best.safetensors")
    assert tensors_sha256(best.values()) == result.summary["weights_sha256"]


def test_a_resumed_run_remembers_its_best(tmp_path: Path) -> None:
    first = train(counting(scored), tmp_path, w5xde.SaveBest("accuracy"), epochs=4)
    assert first.summary["best"]["step"] == 12
    again: dict[str, Any] = {"resume": first.folder.name, "runs": str(tmp_path), "epochs": 5}
    second = w5xde.train(counting(scored), callbacks=[w5xde.SaveBest("accuracy")], **again)
    assert (second.summary["steps"], second.summary["best"]["step"]) == (20, 12)
    # By another metric there is no best yet. Its first evaluation is of where the run was.
    third = w5xde.train(
        counting(scored), callbacks=[w5xde.SaveBest("steps", mode="min")], **again | {"epochs": 6}
    )
    assert third.summary["best"] == {
        "file": "best.safetensors",
        "step": 20,
        "epoch": 5,
        "metric": "steps",
        "value": 20.0,
    }


def test_a_run_without_a_best_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(counting(scored), tmp_path)
    assert result.summary["best"] is None
    assert main(["export", str(result.folder), "--best"]) == 40
    assert "W5-263" in capfd.readouterr().err
    (result.folder / "best.safetensors").write_bytes(b"no weights")
    assert main(["export", str(result.folder), "--best"]) == 40
    assert "W5-407" in capfd.readouterr().err


def test_a_best_that_cannot_be_written_is_told_and_training_goes_on(tmp_path: Path) -> None:
    class Blocking(w5xde.Callback):
        """Puts a folder in the way of the file."""

        def on_start(self, run: w5xde.RunStatus) -> None:
            (tmp_path / run.run / "best.safetensors.tmp").mkdir()

    result = train(counting(scored), tmp_path, Blocking(), w5xde.SaveBest("accuracy"))
    assert result.summary["steps"] == EPOCHS * EPOCH_STEPS
    assert result.summary["best"] is None
    told = [each["text"] for each in events(result.folder) if each["kind"] == "storage"]
    assert any("best.safetensors cannot be written" in text for text in told)


# --- learning rates -------------------------------------------------------------------------------


def test_learning_rates_are_noted_when_they_change(tmp_path: Path) -> None:
    logged: list[tuple[int, list[float]]] = []
    monitor = w5xde.LearningRateMonitor(lambda step, rates: logged.append((step, rates)))
    job = counting(counted, scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 3, gamma=0.5))
    train(job, tmp_path, monitor, epochs=2)
    assert monitor.history == logged == [(0, [1.0]), (3, [0.5]), (6, [0.25])]
