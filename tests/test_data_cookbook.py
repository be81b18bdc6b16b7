"""docs/data.md: its blocks run, its jobs train, and its commands can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.learn.pool import train_in_pool
from w5xde import Job
from w5xde.cli.parser import build_parser
from w5xde.config import Settings
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.coordinator_setup import prepare

TEXT = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line.removeprefix("$ w5xde ") for line in TEXT.splitlines() if line.startswith("$ w5xde ")]


def jobs() -> dict[str, Job]:
    """The jobs of the document, by their headings; each block is run after all those before it."""
    names: dict[str, Any] = {"__name__": "cookbook"}
    found: dict[str, Job] = {}
    for part in TEXT.split("\n## "):
        before = names.get("job")
        for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL):
            exec(compile(block, "docs/data.md", "exec"), names)
        if names.get("job") is not before:
            found[part.splitlines()[0]] = names["job"]
    return found


JOBS = jobs()


def test_every_recipe_has_a_job() -> None:
    assert list(JOBS) == [
        "A data set",
        "A DataLoader",
        "Text of unlike lengths",
        "Weight by tokens",
        "Weighted sampling",
        "Batches by length",
        "Data that depends on the epoch",
        "Streams",
        "Contrastive losses",
    ]


@pytest.mark.parametrize("name", JOBS)
def test_the_job_of_a_recipe_trains(name: str) -> None:
    job, how = JOBS[name], Settings(epochs=4, seed=1)
    if name == "Streams":
        prepared = prepare(job, how)
        assert [samples for samples, _ in prepared.source.epoch(1)] == [8] * 12  # type: ignore[union-attr]
        return
    assert isinstance(prepare(job, how).source, MapSource)
    one, two = (train_in_pool(job, how, nodes=nodes, seed=nodes) for nodes in (1, 2))
    assert one.sha256 == two.sha256
    assert sum(one.losses[-3:]) < sum(one.losses[:3])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_can_be_typed(command: str) -> None:
    build_parser().parse_args(shlex.split(command))


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3
