"""One attempt for each script: its plain loop, then runs with 1, 2 and 7 nodes, compared.

Each attempt is made in a fork, in a folder of its own: scripts compile, seed and write what they like.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import w5xde
from tests.frameworks.compare import NODE_COUNTS, check_same, settings_of, train_here
from tests.learn.reference import initial
from tests.processes import forked
from tests.trial import guide, scripts
from tests.trial.guide import changed_lines
from w5xde.learn.model.digest import weights_sha256

# What is changed in scripts of the guide, before and after, so that they can be compared at all: an order
# that the loop draws from the global generator, and dropout, which draws from the seed of each batch here.
COMPARABLE = {
    "shuffle=True": "shuffle=False",
    "GPT2Config(": "GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, ",
}
# More flags for the run of a section's script.
FLAGS = {"A plain loop": {"batch_size": 8, "batches_per_step": 4}}


class Attempt(NamedTuple):
    """How a script is brought over, how many lines that is, and a function that returns what differs."""

    way: str
    lines: int
    in_processes: bool
    compare: Callable[[], float]


def try_script(script: scripts.Script) -> float:
    job = script.after()
    start, plain = initial(job, settings_of(job, **script.flags)), script.before()
    return check_same(_trained(job, script), plain, start, but_for=script.differ)


def _trained(job: w5xde.Job, script: scripts.Script) -> nn.Module:
    if not script.in_processes:
        return train_here(job, **script.flags).module
    runs = [w5xde.train(job, nodes=count, progress=False, **script.flags) for count in NODE_COUNTS]
    _require_one([run.summary["weights_sha256"] for run in runs])
    return runs[0].model


def try_section(title: str) -> float:
    """Run the script of a section before its change, and after it."""
    texts = guide.changes()[title]
    for found, put in COMPARABLE.items():
        texts = guide.Change(*(text.replace(found, put) for text in texts))
    own = _run(texts.before)
    plain: nn.Module = own["trainer"].model if "trainer" in own else own["model"]
    if "w5xde.Pool" not in texts.after:
        job, flags = _run(texts.after)["job"], FLAGS.get(title, {})
        start = initial(job, settings_of(job, **flags))
        trained = train_here(job, **flags).module
        _forget_key_biases(trained, plain)
        return check_same(trained, plain, start)
    runs = [_run(texts.after.replace("nodes=2", f"nodes={count}"))["model"] for count in NODE_COUNTS]
    _require_one([weights_sha256(model) for model in runs])
    start = _run(texts.before.replace("for step in range(20)", "for step in range(0)"))["model"]
    return check_same(runs[0], plain, start)


def _forget_key_biases(*models: nn.Module) -> None:
    """Set the key biases of GPT-2 to zero.

    No output depends on them: their gradient is zero but for rounding, and Adam makes steps of full size of
    that rounding. In tests/frameworks, which uses double precision and a larger epsilon, they are compared.
    """
    with torch.no_grad():
        for model in models:
            for name, bias in model.named_parameters():
                if name.endswith("attn.c_attn.bias"):
                    bias.chunk(3)[1].zero_()


def _run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "docs/porting.md", "exec"), names)
    return names


def _require_one(hashes: list[str]) -> None:
    if len(set(hashes)) != 1:
        raise AssertionError(f"the bits depend on the number of nodes: {hashes}")


def row(name: str, tried: Attempt, difference: str) -> str:
    """A line of the table in docs/porting.md."""
    where = "real processes" if tried.in_processes else "in one process"
    return f"| {name} | {tried.way} | {tried.lines} | {difference} | yes, {where} |"


def attempts() -> dict[str, Attempt]:
    """All attempts, by the names that docs/porting.md has for them."""
    ways = {
        "A plain loop": ("the plain loop of this guide, batches of 32 shared as 4 × 8", "`Job`"),
        "Hugging Face": ("GPT-2 with a Hugging Face `Trainer`", "`from_trainer`"),
        "Lightning": ("`LightningModule`", "`from_lightning`"),
        "A loop of your own": ("GAN", "`Pool`"),
    }
    found = {}
    for title, change in guide.changes().items():
        name, way = ways[title]
        found[name] = Attempt(
            way, changed_lines(*change), way == "`Pool`", functools.partial(try_section, title)
        )
    for name, script in scripts.SCRIPTS.items():
        found[name] = Attempt(
            "`Job`", _lines(script), script.in_processes, functools.partial(try_script, script)
        )
    return found


def _lines(script: scripts.Script) -> int:
    """The lines that change, with the import; functions that loop and job share are not counted."""
    texts = [inspect.getsource(each).split("\n", 1)[1] for each in (script.before, script.after)]
    return 1 + changed_lines(*texts)


def attempt(compare: Callable[[], float], folder: Path) -> float:
    """The largest difference, found in a fork."""

    def work() -> None:
        warnings.simplefilter("ignore")
        os.chdir(folder)
        Path("found.json").write_text(json.dumps(compare()), encoding="utf-8")

    with forked(work) as process:
        if process.wait() != 0:
            raise AssertionError(process.text)
    return float(json.loads((folder / "found.json").read_text(encoding="utf-8")))
