"""Saves and restores a model of some 70 MB, and prints how much memory that took beyond the model.

A process of its own, because it measures its peak:  python -m tests.runtime.durable.saving FOLDER
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Adam

from tests.learn.jobs import make, settings
from tests.learn.summing import Complete, planned
from w5xde.callbacks.evaluation import Evaluation
from w5xde.control import events as ev
from w5xde.control.steps.cut import Accounts, Cursor, Cut, Progress
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.step.checkpoint import capture, restore
from w5xde.runtime.coordinator.ending import Ending
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger import Ledger
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.evaluation.evaluator import Evaluator
from w5xde.runtime.evaluation.snapshots import ModelSnapshots
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.meters import Meters

WIDTH, LAYERS = 1000, 6
CHECKPOINT_VERSION = 1
# As in a run, where the evaluator stays for the next evaluation.
kept: list[Evaluator] = []


def model() -> nn.Module:
    hidden = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(6, WIDTH), *hidden, nn.Linear(WIDTH, 3))


def trained() -> Prepared:
    """A job whose optimizer has its state."""
    job = make(model, optimizer=lambda p: Adam(p, lr=1e-3), evaluate=lambda trained: 1.0)
    prepared = prepare(job, settings())
    learner = prepared.learner
    learner.replay(Complete(planned(0, [1])), bytes(learner.vector_bytes), frozenset(), 1.0)
    return prepared


def cut_at(version: int) -> Cut:
    return Cut(version, Progress(steps=version), Cursor(), (), Accounts())


class AtOnce:
    """Makes each call at once."""

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None:
        result = function()
        if done is not None:
            done(result)


def memory_kib(line: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(each.split()[1]) for each in text.splitlines() if each.startswith(f"{line}:"))


def grown_bytes(function: Callable[[], Any]) -> int:
    """How much the memory of this process grew at most during a call."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = memory_kib("VmRSS")
    function()
    return 1024 * (memory_kib("VmHWM") - before)


async def evaluate(prepared: Prepared) -> None:
    found: asyncio.Future[Evaluation] = asyncio.get_running_loop().create_future()
    owner = Actor("learner", found.set_exception, inline=False)
    reports = SimpleNamespace(found=found.set_result, failed=print)
    snapshots = ModelSnapshots(prepared.learner, owner, lambda: Progress(steps=1, epochs=2))
    evaluator = Evaluator(prepared, snapshots, reports)
    evaluator.measure()
    measured = await found
    assert measured == {"score": 1.0}
    assert (measured.step, measured.epoch) == (1, 2)
    kept.append(evaluator)
    evaluator.stop()
    owner.stop()


def main(folder: Path) -> None:
    prepared = trained()
    learner = prepared.learner
    run = RunFolder(settings(name="mine", runs=str(folder)), "mine")
    journal = Journal(Ledger(run.disk, time.time), lambda: capture(learner), keep=3, logs_steps=False)
    journal.begin([], 0)
    events: list[ev.Event] = []
    journal.start(AtOnce(), AtOnce(), events.append, print)
    report = {"state": 3 * learner.vector_bytes}
    asyncio.run(evaluate(prepared))
    gc.collect()
    report["models"] = sum(isinstance(each, FlatModel) for each in gc.get_objects())
    cut = cut_at(CHECKPOINT_VERSION)
    report["checkpoint"] = grown_bytes(lambda: journal.save(cut, Meters().kept(), 0.0))
    assert [type(event) for event in events] == [ev.Saved], events

    def end() -> None:
        async def save() -> None:
            # Another version, so that the last checkpoint is written too.
            learner.version = 2
            writer = Actor("writer", lambda error: None, inline=False)
            ending = Ending(learner, journal, run, writer, settings(), print)
            saved = await ending.save(cut_at(2), Meters().kept())
            assert saved.is_durable
            writer.stop()

        asyncio.run(save())

    report["end"] = grown_bytes(end)
    before = learner.weights_sha256()
    with torch.no_grad():
        learner.flat.state.zero_()
    learner.optimizer.state.clear()

    def resume() -> None:
        checkpoint, damaged = journal.store.newest()
        assert checkpoint is not None, damaged
        restore(learner, checkpoint.files)

    report["resume"] = grown_bytes(resume)
    assert learner.weights_sha256() == before
    run.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
