"""A step that is undone and made again counts once, in total and for each node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import w5xde
from tests.processes import events
from tests.system.jobs import data, loss
from w5xde.runtime.durable.audit import audit_run


class FailsOnce(torch.optim.SGD):
    """Leaves a NaN in the parameters at its fifth step, and never again."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        type(self).steps += 1
        if type(self).steps == 5:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0].fill_(torch.nan)
        return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_batches_of_an_undone_step_count_once(mode: str, tmp_path: Path) -> None:
    FailsOnce.steps = 0
    job = w5xde.Job(
        model=lambda: torch.nn.Linear(10, 4),
        data=data,
        loss=loss,
        optimizer=lambda params: FailsOnce(params, lr=0.1),
    )
    result = w5xde.train(job, nodes=2, mode=mode, epochs=8, runs=str(tmp_path), name="mine", log="silent")
    assert [event for event in events(result.folder) if event["kind"] == "undo"], "no step was undone"
    summary = result.summary
    assert sum(node["batches"] for node in summary["nodes"]) == summary["batches"]
    assert sum(node["samples"] for node in summary["nodes"]) == summary["samples"]
    manifest = json.loads((result.folder / "manifest.json").read_text())
    found = audit_run(result.folder).findings.nodes
    # A node that joined when all was lent has no batch, and is not in the ledger's steps.
    counted = {node["name"]: node["batches"] for node in manifest["result"]["nodes"] if node["batches"]}
    assert counted == {name: each.batches for name, each in found.items()}
