"""Large updates over sockets, with real processes: checked while they arrive, the same bits in the end."""

from __future__ import annotations

import math
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import w5xde
from tests.processes import events
from w5xde.learn.step.incoming import StoredVector
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.updates import Updates

SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 10,
    "batches_per_step": 8,
    "seed": 5,
    "log": "silent",
    "road": "unix",
}


def model() -> nn.Module:
    """Several pieces of a megabyte, with a running mean and a counter at its end."""
    return nn.Sequential(
        nn.Linear(10, 900), nn.BatchNorm1d(900), nn.ReLU(), nn.Linear(900, 900), nn.Linear(900, 4)
    )


def data() -> TensorDataset:
    inputs = torch.randn(160, 10, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs.sum(1).remainder(4).floor().long())


def loss(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


class Disturbed(Updates):
    """Does something to a peer when the first bytes of its large update are about to be read."""

    begun = 0
    disturb: Callable[[Peer, Any], None] = staticmethod(lambda peer, place: None)

    def place(self, peer: Peer, body_bytes: int) -> Any:
        found = super().place(peer, body_bytes)
        if isinstance(found, StoredVector):
            type(self).begun += 1
        type(self).disturb(peer, found)
        return found


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> type[Disturbed]:
    class Own(Disturbed):
        pass

    monkeypatch.setattr("w5xde.runtime.pipeline.pipeline.Updates", Own)
    return Own


def train(folder: Path, loss: Any = loss, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    job = w5xde.Job(
        model=model, data=data, loss=loss, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)
    )
    result = w5xde.train(job, runs=str(folder / "runs"), name="run", **SETTINGS | {"nodes": 4} | settings)
    return result.summary, events(folder / "runs" / "run")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights that one node gives."""
    result, _ = train(tmp_path_factory.mktemp("clean"), nodes=1)
    return str(result["weights_sha256"])


@pytest.mark.parametrize("road", ["unix", "tcp"])
def test_the_weights_are_those_of_one_node(
    road: str, clean: str, disturbed: type[Disturbed], tmp_path: Path
) -> None:
    result, _ = train(tmp_path, road=road)
    assert result["weights_sha256"] == clean
    assert disturbed.begun > 0


def test_updates_in_fewer_bits_are_widened_while_they_arrive(tmp_path: Path) -> None:
    result, _ = train(tmp_path, compress="bf16")
    assert result["loss_last"] < 2


def test_a_node_whose_connection_breaks_in_the_middle_costs_nothing_but_its_batches(
    clean: str, disturbed: type[Disturbed], tmp_path: Path
) -> None:
    cut: list[str] = []

    def abort(peer: Peer, place: Any) -> None:
        if len(cut) < 2 and peer.name not in cut:
            cut.append(peer.name)
            peer.connection.abort()

    disturbed.disturb = staticmethod(abort)
    result, told = train(tmp_path)
    assert result["weights_sha256"] == clean
    left = {record["node"] for record in told if record["kind"] == "left"}
    assert set(cut) <= left
    assert len(cut) == 2


@pytest.mark.parametrize("wrong", [math.nan, 1e9])
def test_an_update_that_proves_bad_at_its_last_piece_is_never_in_the_model(
    wrong: float, clean: str, disturbed: type[Disturbed], tmp_path: Path
) -> None:
    bad: list[str] = []

    def spoil(peer: Peer, place: Any) -> None:
        if bad or not isinstance(place, StoredVector):
            return
        bad.append(peer.name)
        take, total, seen = place.buffer_updated, len(place.body), 0

        def tampered(count: int) -> None:
            nonlocal seen
            seen += count
            if seen == total:
                place.body[total - count : total - count + 4] = struct.pack("f", wrong)
            take(count)

        place.buffer_updated = tampered  # type: ignore[method-assign]

    disturbed.disturb = staticmethod(spoil)
    result, told = train(tmp_path, max_update_norm="1e6", road="tcp")
    assert result["weights_sha256"] == clean
    assert [record["node"] for record in told if record["kind"] == "doubt"] == bad


def test_a_killed_process_is_like_a_broken_connection(
    clean: str, disturbed: type[Disturbed], tmp_path: Path
) -> None:
    killed: list[int] = []
    pids: dict[str, int] = {}

    def kill(peer: Peer, place: Any) -> None:
        pid = pids.get(peer.name)
        if pid is not None and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    class Pids(w5xde.Callback):
        def on_step(self, run: Any, step: int, loss: float) -> None:
            pids.update({node.name: node.pid for node in run.nodes if node.pid is not None})

    disturbed.disturb = staticmethod(kill)
    result, _ = train(tmp_path, callbacks=[Pids()])
    assert killed
    assert result["weights_sha256"] == clean
