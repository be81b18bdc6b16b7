"""Files of users with a Trainer or a LightningModule, trained by the command with real processes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import GPT2LMHeadModel

import w5xde
from tests.frameworks import tiny_gpt2
from tests.frameworks.compare import NODE_COUNTS
from tests.frameworks.tiny_modules import SEED, Images, Warmed, fit, seeded, trainer_arguments
from tests.processes import ROOT, command

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("frameworks")]

HUGGING_FACE = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path

import w5xde
from tests.frameworks import tiny_gpt2

job = w5xde.from_trainer(
    lambda: tiny_gpt2.trainer(
        Path("trained"), gradient_accumulation_steps=3, save_strategy="epoch", eval_strategy="epoch",
        _eval_dataset=tiny_gpt2.Texts(9),
    )
)
"""

LIGHTNING = f"""
import sys

sys.path.insert(0, {str(ROOT)!r})
import w5xde
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from tests.frameworks.tiny_modules import Images, Normed, trainer_arguments

job = w5xde.from_lightning(
    Normed,
    Images,
    trainer=trainer_arguments(
        max_epochs=50, accumulate_grad_batches=2, log_every_n_steps=2, logger=CSVLogger("logs"),
        callbacks=[EarlyStopping("val_loss", patience=2, min_delta=10.0)],
    ),
)
"""


def far(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(
        float((first[name] - second[name]).norm() / second[name].norm().clamp(min=1e-12)) for name in first
    )


def test_a_trainer_is_trained_by_one_command_and_saved_where_the_trainer_saves(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HUGGING_FACE, encoding="utf-8")
    with command("train", "train.py", "--nodes", "2", "--name", "gpt", cwd=tmp_path) as run:
        assert run.wait() == 0, run.text
    result = json.loads((tmp_path / "runs" / "gpt" / "manifest.json").read_text())["result"]
    assert set(result["metrics"]) == {"eval_loss"}
    theirs = tiny_gpt2.trainer(tmp_path / "own", gradient_accumulation_steps=3)
    theirs.train()
    ours = load_file(tmp_path / "runs" / "gpt" / "model.safetensors")
    assert far(ours, {name: theirs.model.state_dict()[name] for name in ours}) < 1e-6
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "trained", dtype=torch.float64)
    assert far(dict(saved.state_dict()), dict(theirs.model.state_dict())) < 1e-6


@pytest.mark.parametrize("kind", ["trainer", "module"])
def test_the_same_bits_for_one_two_and_seven_nodes(tmp_path: Path, kind: str) -> None:
    def jobs() -> w5xde.Job:
        if kind == "trainer":
            return w5xde.from_trainer(
                lambda: tiny_gpt2.trainer(tmp_path / "out", gradient_accumulation_steps=8, num_train_epochs=1)
            )
        return w5xde.from_lightning(
            Warmed, Images, trainer=trainer_arguments(max_epochs=2, devices=6, gradient_clip_val=0.1)
        )

    hashes = {
        w5xde.train(jobs(), nodes=count, runs=str(tmp_path), log="silent").summary["weights_sha256"]
        for count in NODE_COUNTS
    }
    assert len(hashes) == 1


class Stream(IterableDataset[Any]):
    """The texts, one after another."""

    def __iter__(self) -> Iterator[Any]:
        texts = tiny_gpt2.Texts()
        return (texts[number] for number in range(len(texts)))


def test_a_stream_of_texts_begins_again_until_all_steps_are_made(tmp_path: Path) -> None:
    def trainer() -> Any:
        return tiny_gpt2.trainer(tmp_path / "out", _train_dataset=Stream(), max_steps=12)

    ours = w5xde.train(w5xde.from_trainer(trainer), nodes=2, runs=str(tmp_path), log="silent")
    theirs = trainer()
    theirs.train()
    assert (ours.summary["steps"], ours.summary["epochs"]) == (12, 1)
    assert far(dict(ours.model.state_dict()), dict(theirs.model.state_dict())) < 1e-6


def test_a_module_whose_nodes_join_stops_early_and_fills_its_logger(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING, encoding="utf-8")
    words = ["serve", "train.py", "--port", "0", "--name", "lit", "--ticket-file", "ticket"]
    with command(*words, cwd=tmp_path) as coordinator:
        coordinator.wait_for("to join:")
        with command("join", "@ticket", "train.py", cwd=tmp_path) as node:
            assert node.wait() == 0, node.text
        assert coordinator.wait() == 0, coordinator.text
    result = json.loads((tmp_path / "runs" / "lit" / "manifest.json").read_text())["result"]
    # The first epoch is the best by so much, and two more are waited for.
    assert (result["epochs"], result["steps"]) == (3, 18)
    assert "did not improve in the last 2 records" in result["reason"]
    assert {"val_loss", "accuracy"} <= set(result["metrics"])
    (file,) = (tmp_path / "logs").rglob("metrics.csv")
    with file.open(encoding="utf-8") as text:
        rows: list[dict[str, Any]] = list(csv.DictReader(text))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(1, 18, 2))
    assert [int(row["step"]) for row in rows if row["val_loss"]][:3] == [5, 11, 17]


def test_a_run_of_a_module_is_resumed_with_its_schedule(tmp_path: Path) -> None:
    def train(**given: Any) -> w5xde.Result:
        job = w5xde.from_lightning(Warmed, Images, trainer=trainer_arguments(max_epochs=4))
        return w5xde.train(job, nodes=1, seed=SEED, runs=str(tmp_path), log="silent", **given)

    class Stop(w5xde.Callback):
        def on_step(self, run: w5xde.RunStatus, step: int, loss: float) -> None:
            if step == 20:
                run.stop("enough for now")

    train(name="whole", callbacks=[Stop()])
    resumed = train(resume="whole")
    assert resumed.summary["steps"] == 44
    theirs = fit(seeded(Warmed), Images(), trainer_arguments(max_epochs=4))
    assert far(dict(resumed.model.state_dict()), dict(theirs.state_dict())) < 1e-6
