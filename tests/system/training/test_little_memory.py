"""A node that cannot hold a lease is lent smaller ones; it leaves only if not even one batch fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import w5xde
from tests.system.harness import events
from w5xde.errors import TrainingError
from w5xde.runtime.node import limits

KIB = 1024
SAMPLES, WIDTH, BATCH_SIZE = 128, 1000, 4
# What a batch takes on the wire, but for its labels.
BATCH_BYTES = 4 * WIDTH * BATCH_SIZE


def data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs.sum(1).remainder(4).floor().long())


wide = w5xde.Job(
    model=lambda: nn.Linear(WIDTH, 4),
    data=data,
    loss=lambda net, batch: cross_entropy(net(batch[0]), batch[1]),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
)


def train(runs: Path, name: str, **more: Any) -> dict[str, Any]:
    settings = {"nodes": 1, "batch_size": BATCH_SIZE, "batches_per_step": 16, "epochs": 3, "log": "silent"}
    summary: dict[str, Any] = w5xde.train(wide, runs=str(runs), name=name, **{**settings, **more}).summary
    return summary


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_node_with_little_memory_is_lent_less_and_stays(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = train(tmp_path, "before", mode=mode)
    monkeypatch.setattr(limits, "MEMORY_PART", 0.0)
    # Room for three batches, so that of leases, which are powers of two, those of two fit.
    monkeypatch.setattr(limits, "WORK_BYTES_LEAST", 3 * BATCH_BYTES + 10 * KIB)
    monkeypatch.setattr(limits, "GROWTH", 4)
    summary = train(tmp_path, "little", mode=mode)
    told = events(tmp_path / "little")
    assert [record["node"] for record in told if record["kind"] in ("joined", "left")] == ["local-1"]
    assert summary["steps"] == before["steps"]
    # In async mode other leases make other versions.
    assert mode == "async" or summary["weights_sha256"] == before["weights_sha256"]


def test_a_node_that_cannot_hold_one_batch_leaves_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MEMORY_PART", 0.0)
    monkeypatch.setattr(limits, "WORK_BYTES_LEAST", BATCH_BYTES - KIB)
    monkeypatch.setattr(limits, "GROWTH", 4)
    with pytest.raises(TrainingError, match="W5-121"):
        train(tmp_path, "too-little")
