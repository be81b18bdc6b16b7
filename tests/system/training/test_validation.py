"""A validation set that nodes measure, with real processes: the same bits, whichever nodes helped."""

from __future__ import annotations

import os
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import w5xde
from tests.processes import events, forked, kill_any_node, wait_until
from tests.system import jobs
from tests.system.training.validation_jobs import (
    EPOCH_STEPS,
    HELD_OUT,
    Heard,
    held_out,
    measure,
    noting,
    plainly,
    processes,
    train,
    validated,
)
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.learn.job.coordinator_setup import prepare

BATCHES = -(-HELD_OUT // 8)


def net_of(weights: dict[str, torch.Tensor]) -> nn.Module:
    net = jobs.model()
    net.load_state_dict(weights)
    return net


def bits_of(heard: Heard) -> list[Any]:
    return [
        (step, epoch, {name: value.hex() for name, value in found.items()})
        for step, epoch, found in heard.results
    ]


def test_the_result_is_that_of_a_plain_loop_and_the_same_bits_for_any_nodes(tmp_path: Path) -> None:
    runs = {nodes: train(tmp_path / str(nodes), nodes=nodes) for nodes in (1, 2, 7)}
    result, heard = runs[1]
    assert [(each.step, each.epoch) for each in heard.told] == [
        (EPOCH_STEPS * epoch, epoch) for epoch in (1, 2, 3)
    ]
    for each in heard.told:
        assert each.metrics == pytest.approx(plainly(net_of(each.weights)), abs=1e-6)
    assert result.summary["metrics"] == heard.told[-1].metrics
    for other, others in runs.values():
        assert bits_of(others) == bits_of(heard)
        assert other.summary["weights_sha256"] == result.summary["weights_sha256"]
    # The same training as without any validation, and no more samples.
    plain = w5xde.train(
        jobs.job, runs=str(tmp_path / "plain"), nodes=2, epochs=3, batch_size=8, batches_per_step=4
    )
    assert plain.summary["weights_sha256"] == result.summary["weights_sha256"]
    assert plain.summary["samples"] == result.summary["samples"] == 3 * jobs.SAMPLES


@pytest.mark.parametrize("mode", ["sync", "async", "rounds"])
def test_the_coordinator_measures_nothing_while_nodes_are_there(tmp_path: Path, mode: str) -> None:
    file = tmp_path / "processes"
    file.touch()
    result, heard = train(tmp_path, validated(measure=noting(file)), nodes=2, mode=mode)
    there = processes(file)
    # One batch is tried here before nodes join.
    assert there.count(os.getpid()) == 1
    assert there[0] == os.getpid()
    assert len(there) - 1 >= BATCHES * len(heard.told) > 0
    assert heard.told[-1].step == result.summary["steps"]
    for each in heard.told:
        assert each.metrics == pytest.approx(plainly(net_of(each.weights)), abs=1e-6)
    lent = [each for each in events(result.folder) if each["kind"] == "lend" and each.get("validates")]
    assert len(lent) > 0
    assert main(["audit", str(result.folder)]) == 0


def test_nodes_that_are_killed_in_a_validation_change_no_bit(tmp_path: Path) -> None:
    _, calm = train(tmp_path / "calm", nodes=2)

    class Kill(w5xde.Callback):
        killed = 0

        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            # The validation of the epoch is about to be lent.
            if step % EPOCH_STEPS == 0:
                kill_any_node(run)
                self.killed += 1

    kill = Kill()
    slow = validated(measure=noting(tmp_path / "processes", seconds=0.02))
    result, heard = train(tmp_path / "killed", slow, nodes=3, callbacks=[kill])
    assert kill.killed >= 2
    assert bits_of(heard) == bits_of(calm)
    assert result.summary["steps"] == 3 * EPOCH_STEPS


def test_training_goes_on_beside_a_validation(tmp_path: Path) -> None:
    slow = validated(measure=noting(tmp_path / "processes", seconds=0.05))
    result, heard = train(tmp_path, slow, nodes=2)
    records = events(result.folder)
    # Work for the next step is lent before the result of a validation is there.
    beside = 0
    is_open = False
    for each in records:
        if each["kind"] == "lend":
            beside += is_open and not each.get("validates")
            is_open |= bool(each.get("validates"))
        elif each["kind"] == "evaluated":
            is_open = False
    assert beside > 0
    assert len(heard.told) == 3


Pair = namedtuple("Pair", ["inputs", "labels"])


def as_pair(rows: list[Any]) -> Pair:
    return Pair(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))


def loader() -> DataLoader[Any]:
    return DataLoader(held_out(), batch_size=16, shuffle=True, collate_fn=as_pair, drop_last=False)


def measure_pair(net: nn.Module, batch: Pair) -> dict[str, torch.Tensor]:
    return measure(net, (batch.inputs, batch.labels))


@pytest.mark.parametrize("data", ["stream", "local", "cached"])
def test_a_data_loader_with_a_collate_function_and_data_of_every_kind(tmp_path: Path, data: str) -> None:
    job = validated(validation=loader, measure=measure_pair)
    result, heard = train(tmp_path, job, nodes=2, data=data)
    for each in heard.told:
        assert each.metrics == pytest.approx(plainly(net_of(each.weights)), abs=1e-6)
    lent = [each for each in events(result.folder) if each["kind"] == "lend" and each.get("validates")]
    ends = {stop for each in lent for _, _, _, stop in each["leases"]}
    assert max(ends) == -(-HELD_OUT // 16)


def test_a_large_model_is_measured_like_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, small = train(tmp_path / "small", nodes=2, epochs=2)
    monkeypatch.setattr("w5xde.learn.model.route.LARGE_BYTES_MIN", 0)
    _, large = train(tmp_path / "large", nodes=2, epochs=2)
    assert bits_of(large) == bits_of(small)
    for each in large.told:
        assert each.metrics == pytest.approx(plainly(net_of(each.weights)), abs=1e-6)


def test_one_number_is_called_score(tmp_path: Path) -> None:
    job = validated(measure=lambda net, batch: float(len(batch[0])))
    _, heard = train(tmp_path, job, nodes=1, epochs=1)
    assert heard.told[-1].metrics == {"score": pytest.approx((8 * 8 * 8 + 6 * 6) / HELD_OUT)}


# --- what follows from metrics --------------------------------------------------------------------


def test_ready_made_callbacks_and_a_plateau_follow_the_metrics(tmp_path: Path) -> None:
    def run(nodes: int) -> tuple[w5xde.Result, Heard]:
        job = validated(
            scheduler=lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(
                opt, factor=0.5, patience=0, threshold=1.0
            )
        )
        callbacks = [w5xde.EarlyStopping("loss", patience=2, min_delta=10.0), w5xde.SaveBest("loss")]
        return train(
            tmp_path / str(nodes), job, nodes=nodes, epochs=9, plateau_metric="loss", callbacks=callbacks
        )

    # No loss is better by so much that it counts: each result halves the rate.
    (result, heard), (other, others) = run(1), run(2)
    assert len(heard.told) == 3 < 9
    assert result.summary["learning_rates"] == [0.01 / 8]
    best = min(heard.told, key=lambda each: each.metrics["loss"])
    assert result.summary["best"]["value"] == best.metrics["loss"]
    assert result.summary["best"]["step"] == best.step
    assert bits_of(others) == bits_of(heard)
    assert other.summary["weights_sha256"] == result.summary["weights_sha256"]


def test_none_is_skipped_with_evaluate_skip_either(tmp_path: Path) -> None:
    _, heard = train(tmp_path, nodes=2, evaluate="skip")
    assert len(heard.told) == 3


def test_a_run_that_is_resumed_validates_what_follows(tmp_path: Path) -> None:
    _, whole = train(tmp_path / "whole", nodes=2)

    class Stop(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            if step == EPOCH_STEPS + 2:
                run.stop("for now")

    first, heard = train(tmp_path / "parts", nodes=2, callbacks=[Stop()])
    stopped_at = first.summary["steps"]
    assert heard.told[-1].step == stopped_at
    second = Heard()
    w5xde.train(
        validated(),
        resume=first.folder.name,
        runs=str(tmp_path / "parts"),
        nodes=1,
        callbacks=[second],
    )
    due = [each for each in bits_of(heard) if each[0] != stopped_at] + bits_of(second)
    assert due == bits_of(whole)


def test_a_coordinator_that_is_killed_in_a_validation_makes_up_for_it(tmp_path: Path) -> None:
    _, calm = train(tmp_path / "calm", nodes=2, epochs=2)
    runs = tmp_path / "killed"

    def is_saved() -> bool:
        names = [path.name for path in runs.glob("mine/checkpoints/step-*")]
        return max(names, default="") >= f"step-{EPOCH_STEPS:09}"

    def serve() -> None:
        home = os.getpid()

        def die(net: nn.Module, batch: Any) -> Any:
            """A node kills the coordinator, as soon as that has a checkpoint of the step that is measured."""
            if os.getpid() != home:
                wait_until(is_saved, lambda: "no checkpoint is written")
                os.kill(home, signal.SIGKILL)
            return measure(net, batch)

        train(runs, validated(measure=die), nodes=2, epochs=2, name="mine", checkpoint_every="1steps")

    with forked(serve) as child:
        assert child.wait() == -signal.SIGKILL
    heard = Heard()
    w5xde.train(validated(), resume="mine", runs=str(runs), callbacks=[heard])
    assert bits_of(heard) == bits_of(calm)


# --- trouble --------------------------------------------------------------------------------------


def test_a_batch_that_fails_wherever_it_is_tried_fails_the_evaluation_not_the_training(
    tmp_path: Path,
) -> None:
    def picky(net: nn.Module, batch: Any) -> dict[str, Any]:
        if len(batch[0]) < 8:
            raise ValueError("half a batch")
        return measure(net, batch)

    result, heard = train(tmp_path, validated(measure=picky), nodes=2, epochs=2)
    assert heard.told == []
    assert result.summary["steps"] == 2 * EPOCH_STEPS
    told = [each["text"] for each in events(result.folder) if each["kind"] == "evaluation failed"]
    assert len(told) == 2
    assert f"batch {BATCHES - 1} of the validation of step {EPOCH_STEPS}" in told[0]
    assert "half a batch" in told[0]


class Torn(TensorDataset):
    def __getitem__(self, number: int) -> Any:
        if number == HELD_OUT - 1:
            raise OSError("it is torn")
        return super().__getitem__(number)


def test_a_batch_that_cannot_be_read_fails_the_evaluation_not_the_training(tmp_path: Path) -> None:
    job = validated(validation=lambda: Torn(*held_out().tensors))
    result, heard = train(tmp_path, job, nodes=2, epochs=1)
    assert heard.told == []
    assert result.summary["steps"] == EPOCH_STEPS
    (told,) = [each["text"] for each in events(result.folder) if each["kind"] == "evaluation failed"]
    assert f"batch {BATCHES - 1} of the validation set cannot be read" in told
    assert "it is torn" in told


def test_a_node_that_lies_about_what_it_measured_is_turned_out_with_verify(tmp_path: Path) -> None:
    """It lies in every second process: the first node to join is honest."""
    home = os.getpid()
    file = tmp_path / "liar"

    def lying(net: nn.Module, batch: Any) -> dict[str, Any]:
        found = measure(net, batch)
        if os.getpid() != home:
            try:
                with file.open("x") as new:
                    new.write(str(os.getpid()))
            except FileExistsError:
                pass
            if file.read_text() == str(os.getpid()):
                return {**found, "loss": found["loss"] / 3}
        return found

    _, honest = train(tmp_path / "honest", nodes=2)
    result, heard = train(tmp_path / "lied", validated(measure=lying), nodes=2, verify=1.0)
    assert bits_of(heard) == bits_of(honest)
    cheats = [each for each in events(result.folder) if each["kind"] == "cheat"]
    assert cheats
    assert "loss of validation batch" in cheats[0]["text"]


class Noisy(TensorDataset):
    def __getitem__(self, number: int) -> Any:
        inputs, label = super().__getitem__(number)
        return inputs + 0.01 * torch.randn(inputs.shape), label


def test_a_validation_set_that_draws_is_the_same_for_any_nodes_and_is_not_verified(tmp_path: Path) -> None:
    job = validated(validation=lambda: Noisy(*held_out().tensors))
    (_, one), (_, two) = (train(tmp_path / str(nodes), job, nodes=nodes) for nodes in (1, 2))
    assert bits_of(one) == bits_of(two)
    with pytest.raises(UsageError, match="validation set draws random numbers") as caught:
        train(tmp_path, job, nodes=1, verify=0.5)
    assert caught.value.code == "W5-210"


def test_the_coordinator_would_measure_the_same_bits(tmp_path: Path) -> None:
    """So that it can do without nodes."""
    _, heard = train(tmp_path, nodes=2, epochs=1)
    prepared = prepare(validated(), Settings(batch_size=8, batches_per_step=4))
    assert prepared.validation is not None
    here = prepared.validation.evaluate(net_of(heard.told[-1].weights))
    assert {name: value.hex() for name, value in here.items()} == bits_of(heard)[-1][2]
