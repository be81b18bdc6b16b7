"""docs/callbacks.md: its blocks run, its jobs train with its callbacks, and its commands can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import w5xde
from w5xde.cli.parser import build_parser

TEXT = (Path(__file__).parents[1] / "docs" / "callbacks.md").read_text(encoding="utf-8")
COMMANDS = [line.removeprefix("$ w5xde ") for line in TEXT.splitlines() if line.startswith("$ w5xde ")]


def recipes() -> dict[str, tuple[w5xde.Job, list[w5xde.Callback]]]:
    """The jobs and callbacks of the document by their headings; each block runs after those before it."""
    names: dict[str, Any] = {"__name__": "cookbook"}
    found: dict[str, tuple[w5xde.Job, list[w5xde.Callback]]] = {}
    for part in TEXT.split("\n## "):
        before = names.get("callbacks")
        for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL):
            exec(compile(block, "docs/callbacks.md", "exec"), names)
        if names.get("callbacks") is not before:
            found[part.splitlines()[0]] = (names["job"], names["callbacks"])
    return found


RECIPES = recipes()


def kinds(callbacks: Iterable[w5xde.Callback]) -> list[str]:
    return [type(each).__name__ for each in callbacks]


def test_every_recipe_is_there() -> None:
    assert {name: kinds(callbacks) for name, (_, callbacks) in RECIPES.items()} == {
        "Evaluate at the coordinator": [],
        "Let nodes measure a validation set": [],
        "Stop when nothing improves": ["EarlyStopping"],
        "Keep the best weights": ["SaveBest", "EarlyStopping"],
        "Lower the learning rate on a plateau": ["LearningRateMonitor"],
        "A callback of your own": ["LowEnough"],
        "Read weights": ["Snapshots"],
    }


@pytest.mark.parametrize("name", RECIPES)
def test_the_job_of_a_recipe_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job, callbacks = RECIPES[name]
    result = w5xde.train(job, nodes=1, epochs=12, runs=str(tmp_path / "runs"), callbacks=callbacks)
    summary = result.summary
    assert summary["metrics_step"] == summary["steps"]
    match name:
        case "Stop when nothing improves":
            assert "EarlyStopping" in summary["reason"] or "stopped by a callback" in summary["reason"]
            assert summary["steps"] < 12 * 4
        case "Keep the best weights":
            assert summary["best"]["metric"] == "accuracy"
        case "Lower the learning rate on a plateau":
            assert callbacks[0].history  # type: ignore[attr-defined]
        case "A callback of your own":
            assert "is enough" in summary["reason"]
            assert callbacks[0].state_dict() == {"steps": summary["steps"]}
        case "Read weights":
            assert len(list(tmp_path.glob("step-*.safetensors"))) == 12
        case _:
            assert summary["metrics"]["accuracy"] > 0.8


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_can_be_typed(command: str) -> None:
    build_parser().parse_args(shlex.split(command))


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 2
