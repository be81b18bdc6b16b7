"""Checkpoints that were made to harm: their hashes are right, and what they hold is refused all the same."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import w5xde
from tests.learn.states import content_of
from tests.processes import JOBS
from tests.system.jobs import job
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.errors import W5xdeError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.checkpoint import LEARNER, MODEL, TRAINING, capture, restore
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import RealDisk

Files = dict[str, bytes]
Spoil = Callable[[Files], None]


class Harm:
    """What a pickle would do if anybody loaded it."""

    was_done = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Harm, "was_done", True)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def put(name: str, data: bytes) -> Spoil:
    return lambda files: files.update({name: data})


def facts(change: Callable[[Any], None]) -> Spoil:
    """Change what is not a tensor."""

    def spoil(files: Files) -> None:
        learner = json.loads(files[LEARNER])
        change(learner)
        files[LEARNER] = json.dumps(learner).encode()

    return spoil


def tensors(name: str, change: Callable[[Any], None]) -> Spoil:
    """Change the tensors of a file."""

    def spoil(files: Files) -> None:
        held = load(files[name])
        change(held)
        files[name] = save(held)

    return spoil


def nested(depth: int) -> bytes:
    return b'{"tuple":[' * depth + b"1" + b"]}" * depth


def deep_facts(files: Files) -> None:
    whole = json.loads(files[LEARNER]) | {"optimizer_state": "HERE"}
    files[LEARNER] = json.dumps(whole).encode().replace(b'"HERE"', nested(900))


OVERLAPPING = {
    name: {"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]} for name, at in (("a", 0), ("b", 2))
}
BEYOND = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
HUGE = {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}

HOSTILE: dict[str, Spoil] = {
    "a pickle for weights": put(MODEL, pickle.dumps(Harm())),
    "a pickle for the optimizer": put(TRAINING, pickle.dumps(Harm())),
    "a pickle for the rest": put(LEARNER, pickle.dumps(Harm())),
    "a header of a gibibyte": put(MODEL, struct.pack("<Q", 2**30) + b"{}"),
    "a header of more than there is": put(TRAINING, struct.pack("<Q", 2**63) + b"{}"),
    "tensors on top of each other": put(MODEL, safetensors(OVERLAPPING, b"\0" * 6)),
    "a tensor beyond the end": put(MODEL, safetensors(BEYOND, b"\0" * 4)),
    "a tensor larger than anything": put(MODEL, safetensors(HUGE, b"\0" * 4)),
    "no weights": put(MODEL, safetensors({})),
    "empty files": lambda files: files.update(dict.fromkeys(files, b"")),
    "a file is not there": lambda files: files.pop(TRAINING) and None,
    "one weight fewer": tensors(MODEL, lambda held: held.pop("0.weight")),
    "a weight of another shape": tensors(MODEL, lambda held: held.update({"0.weight": torch.zeros(1)})),
    "a weight of another type": tensors(MODEL, lambda held: held.update({"0.bias": held["0.bias"].double()})),
    "no number": put(LEARNER, b'{"version":NaN}'),
    "a number that is none": facts(lambda learner: learner.update(version="seven")),
    "a negative version": facts(lambda learner: learner.update(version=-1)),
    "a list": put(LEARNER, b"[]"),
    "nothing known": put(LEARNER, b"{}"),
    "a deep well": put(LEARNER, b"[" * 100_000 + b"]" * 100_000),
    "a deep well where it fits": deep_facts,
    "an unknown kind": facts(lambda learner: learner.update(optimizer_state={"object": "os.system"})),
    "several kinds at once": facts(
        lambda learner: learner.update(optimizer_state={"int": "1", "float": "2"})
    ),
    "a tensor that is not there": facts(lambda learner: learner.update(optimizer_state={"tensor": "x"})),
    "an optimizer's state that is a number": facts(lambda learner: learner.update(optimizer_state=7)),
    "an integer of a million digits": facts(
        lambda learner: learner.update(optimizer_state={"int": "9" * 1_000_000})
    ),
    "unhashable keys": facts(lambda learner: learner.update(optimizer_state={"dict": [[[], 1]]})),
    "no chance": facts(lambda learner: learner.update(random={"dict": []})),
    "another chance": tensors(TRAINING, lambda held: held.update({"random.torch": held["random.torch"][:9]})),
    "an improper layout": facts(lambda learner: learner.update(layout={"entries": [{"name": 7}]})),
    "improper groups": facts(lambda learner: learner.update(groups=None)),
    "improper defaults": facts(lambda learner: learner.update(optimizer_defaults=[1])),
}


@pytest.fixture(scope="module")
def honest() -> Files:
    return content_of(capture(prepare(job, Settings()).learner))


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_checkpoint_is_refused_with_a_sentence(case: str, honest: Files) -> None:
    files = dict(honest)
    HOSTILE[case](files)
    with pytest.raises(W5xdeError):
        restore(prepare(job, Settings()).learner, files)
    assert not Harm.was_done


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return w5xde.train(f"{JOBS}:job", nodes=1, epochs=1, name="mine", runs=str(runs)).folder


def planted(run_folder: Path, runs: Path, spoil: Spoil, **changes: Any) -> None:
    """A copy of the run whose only checkpoint is another."""
    shutil.copytree(run_folder, runs / "mine")
    store = CheckpointStore(RealDisk(runs / "mine"))
    checkpoint = store.read(store.versions()[-1])
    files = dict(checkpoint.files)
    shutil.rmtree(runs / "mine" / "checkpoints")
    spoil(files)
    facts = {key: value for key, value in (checkpoint.facts | changes).items() if value is not None}
    store.save(checkpoint.version, {name: [data] for name, data in files.items()}, facts)


BAD_WEIGHTS = ["a pickle for weights", "a header of a gibibyte"]
COMMANDS = {
    "resume": ["train", "--resume", "mine", "--epochs", "2"],
    "audit": ["audit", "mine"],
    "export": ["export", "mine", "--to", "pt", "--out", "mine.pt"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "case", ["a pickle for weights", "a header of a gibibyte", "nothing known", "no chance"]
)
def test_the_command_tells_it_without_a_traceback(
    case: str,
    command: str,
    run_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    planted(run_folder, tmp_path, HOSTILE[case])
    status = main([*COMMANDS[command], "--runs", str(tmp_path)])
    told = capfd.readouterr()
    assert "Traceback" not in told.err + told.out
    assert "internal error" not in told.err
    # An audit sees another checkpoint than was recorded; the weights may still be fine to export.
    assert status == {"audit": 1, "resume": 40}.get(
        command, 40 if "weights" in case or "header" in case else 0
    )
    assert not Harm.was_done


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("key", ["cut", "ledger", "meters", "weights_sha256"])
@pytest.mark.parametrize("value", [None, [7], {"sha256": 7}])
def test_facts_that_make_no_sense_are_told_without_a_traceback(
    key: str,
    value: Any,
    command: str,
    run_folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    planted(run_folder, tmp_path, lambda files: None, **{key: value})
    main([*COMMANDS[command], "--runs", str(tmp_path)])
    told = capfd.readouterr()
    assert "Traceback" not in told.err + told.out
    assert "internal error" not in told.err
