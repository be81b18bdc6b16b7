"""Updates that are added while they arrive, with real processes: the same bits, whatever happens halfway."""

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
from w5xde.learn.model.layout import Vector
from w5xde.learn.step.incoming import Added
from w5xde.runtime.coordinator import arrivals
from w5xde.runtime.coordinator import updates as intake
from w5xde.runtime.coordinator.arrivals import Arrivals
from w5xde.runtime.coordinator.peer import Peer

SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 10, "batches_per_step": 8, "seed": 5, "log": "silent"}


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


class Watched(Arrivals):
    """Does something to a peer while what it gave is being added."""

    began = 0
    disturb: Callable[[Watched, Peer], None] = staticmethod(lambda watched, peer: None)

    def _begin(self, peer: Peer, lease: Any, coming: Any, vector: Vector | None) -> None:
        super()._begin(peer, lease, coming, vector)
        if peer.arrival is not None and lease.id in self._claims:
            type(self).began += 1
            type(self).disturb(self, peer)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    class Own(Watched):
        pass

    monkeypatch.setattr(intake, "Arrivals", Own)
    return Own


def train(folder: Path, loss: Any = loss, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    job = w5xde.Job(
        model=model, data=data, loss=loss, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)
    )
    result = w5xde.train(job, runs=str(folder / "runs"), name="run", **SETTINGS | {"nodes": 4} | settings)
    return result.summary, events(folder / "runs" / "run")


def begun_anew(told: list[dict[str, Any]]) -> list[str]:
    return [record["text"] for record in told if record["kind"] == "spoilt"]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of one node, of which nothing is added to anything on its way."""
    result, _ = train(tmp_path_factory.mktemp("clean"), nodes=1)
    return str(result["weights_sha256"])


@pytest.mark.parametrize("road", ["auto", "tcp"])
def test_the_weights_are_those_of_one_node(
    road: str, clean: str, watched: type[Watched], tmp_path: Path
) -> None:
    result, told = train(tmp_path, road=road)
    assert result["weights_sha256"] == clean
    assert watched.began > 0
    assert begun_anew(told) == []


def test_what_comes_in_fewer_bits_is_added_too(watched: type[Watched], tmp_path: Path) -> None:
    result, told = train(tmp_path, compress="bf16")
    assert watched.began > 0
    assert result["loss_last"] < 2
    assert begun_anew(told) == []


def test_a_node_that_is_killed_halfway_costs_a_step_and_nothing_else(
    clean: str, watched: type[Watched], tmp_path: Path
) -> None:
    killed: list[str] = []

    def kill(own: Watched, peer: Peer) -> None:
        if len(killed) < 2:
            killed.append(peer.name)
            peer.connection.abort()

    watched.disturb = staticmethod(kill)
    result, told = train(tmp_path)
    assert result["weights_sha256"] == clean
    assert len(begun_anew(told)) == len(killed) == 2
    assert f"{killed[0]} went while" in begun_anew(told)[0]


def test_a_node_that_falls_asleep_halfway_is_not_waited_for(
    clean: str, watched: type[Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "PATIENCE_SECONDS", 0.5)
    asleep: list[Peer] = []

    def lull(own: Watched, peer: Peer) -> None:
        if not asleep:
            asleep.append(peer)
            peer.connection._pause_reading()

    watched.disturb = staticmethod(lull)
    result, told = train(tmp_path)
    assert result["weights_sha256"] == clean
    assert f"what {asleep[0].name} gave came too slowly" in begun_anew(told)[0]


@pytest.mark.parametrize(("wrong", "what"), [(math.nan, "not finite"), (1e9, "refused")])
def test_what_proves_bad_at_its_end_is_never_in_the_model(
    wrong: float, what: str, clean: str, watched: type[Watched], tmp_path: Path
) -> None:
    bad: list[str] = []

    def spoil(own: Watched, peer: Peer) -> None:
        arrival = peer.arrival
        if bad or not isinstance(arrival, Added):
            return
        bad.append(peer.name)
        take = arrival.buffer_updated

        def tampered(count: int) -> None:
            if arrival._start + arrival._filled + count == arrival._total:
                arrival._memory[:4] = struct.pack("f", wrong)
            take(count)

        arrival.buffer_updated = tampered  # type: ignore[method-assign]

    watched.disturb = staticmethod(spoil)
    result, told = train(tmp_path, max_update_norm="1e6")
    assert result["weights_sha256"] == clean
    assert f"what {bad[0]} gave is {what}" in begun_anew(told)[0]
    assert [record["node"] for record in told if record["kind"] == "doubt"] == bad


def test_a_killed_process_is_as_good_as_a_broken_line(
    clean: str, watched: type[Watched], tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill(own: Watched, peer: Peer) -> None:
        pid = pids.get(peer.name)
        if pid is not None and not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    pids: dict[str, int] = {}

    class Pids(w5xde.Callback):
        def on_step(self, run: Any, step: int, loss: float) -> None:
            pids.update({node.name: node.pid for node in run.nodes if node.pid is not None})

    watched.disturb = staticmethod(kill)
    result, _ = train(tmp_path, callbacks=[Pids()])
    assert killed
    assert result["weights_sha256"] == clean
