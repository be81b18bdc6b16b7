"""Roads: TCP, a Unix socket and shared memory give the same bits, whatever happens to the processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import w5xde
from tests.processes import AtStep, events, forked, pid_of, wait_for_file, wait_until
from w5xde.callbacks.status import RunStatus
from w5xde.learn.model.route import LARGE_BYTES_MIN, SHARED_BYTES_MIN, VIEWED_BYTES_MIN
from w5xde.runtime.pipeline.updates import Updates
from w5xde.runtime.system.shared_memory import NodeRegions

FEATURES, CLASSES = 10, 4
SETTINGS: dict[str, Any] = {"steps": 8, "batch_size": 8, "batches_per_step": 4, "seed": 5, "log": "silent"}


class Shaped(nn.Module):
    """Tied weights, frozen ones, a running mean and a counter, and a parameter that is never used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.norm = nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.middle.weight
        self.frozen = nn.Linear(width, width // 8)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(width // 8, CLASSES)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(inputs)))
        hidden = torch.relu(self.again(torch.relu(self.middle(hidden))))
        out: Tensor = self.last(self.frozen(hidden))
        return out


def data() -> TensorDataset:
    inputs = torch.randn(160, FEATURES, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, inputs.sum(1).remainder(CLASSES).floor().long())


def loss(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for each in params if each.requires_grad], lr=1e-3)


def job_of(width: int) -> w5xde.Job:
    return w5xde.Job(model=lambda: Shaped(width), data=data, loss=loss, optimizer=adam)


# By how nodes get the parameters on the shared road: through a socket, as a copy from a learner on the event
# loop, as a copy from one with a thread, as a view.
WIDTHS = {"sent": 100, "inline": 300, "copied": 700, "viewed": 2100}
JOBS = {name: job_of(width) for name, width in WIDTHS.items()}


def train(folder: Path, size: str, **settings: Any) -> w5xde.Result:
    given = SETTINGS | {"nodes": 2, "runs": str(folder), "name": "run"} | settings
    return w5xde.train(JOBS[size], **given)


def sha256(result: w5xde.Result) -> str:
    return str(result.summary["weights_sha256"])


@pytest.fixture(scope="module")
def by_tcp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The weights that one node gives by TCP, for each size."""
    found: dict[str, str] = {}

    def of(size: str) -> str:
        if size not in found:
            found[size] = sha256(train(tmp_path_factory.mktemp(size), size, nodes=1, road="tcp"))
        return found[size]

    return of


def moved_bytes(result: w5xde.Result) -> int:
    return int(result.summary["bytes_sent"]) + int(result.summary["bytes_received"])


def test_the_sizes_are_those_that_take_different_ways() -> None:
    sent, inline, copied, viewed = (4 * (width * width + 14 * width) for width in WIDTHS.values())
    assert sent < SHARED_BYTES_MIN <= inline < LARGE_BYTES_MIN <= copied < VIEWED_BYTES_MIN <= viewed


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("road", ["unix", "shared", "auto"])
def test_every_road_gives_the_same_weights(
    road: str, size: str, by_tcp: Callable[[str], str], tmp_path: Path
) -> None:
    result = train(tmp_path, size, road=road)
    assert sha256(result) == by_tcp(size)


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize(("size", "least"), [("inline", SHARED_BYTES_MIN), ("viewed", VIEWED_BYTES_MIN)])
def test_any_number_of_nodes_gives_the_same_weights_by_shared_memory(
    nodes: int, size: str, least: int, by_tcp: Callable[[str], str], tmp_path: Path
) -> None:
    result = train(tmp_path, size, nodes=nodes)
    assert sha256(result) == by_tcp(size)
    # Nothing of the size of the model went through a socket.
    assert moved_bytes(result) < least


class Enough(w5xde.Callback):
    """Interrupts the run once a node has given some batches."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_over = False

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        if not self._is_over and any(each.name == self._name and each.batches > 2 for each in run.nodes):
            self._is_over = True
            signal.raise_signal(signal.SIGINT)


def test_a_guest_by_tcp_and_local_nodes_by_shared_memory_train_one_model(tmp_path: Path) -> None:
    ticket = tmp_path / "ticket"

    def join() -> None:
        w5xde.join(f"@{wait_for_file(ticket)}", JOBS["viewed"], road="tcp", node_name="guest")

    with forked(join) as guest:
        more: dict[str, Any] = {"steps": 10**6, "ticket_file": str(ticket), "callbacks": [Enough("guest")]}
        result = train(tmp_path, "viewed", **more)
        assert guest.wait() == 0
    alone = train(tmp_path / "alone", "viewed", steps=result.summary["steps"], nodes=1, road="unix")
    assert sha256(result) == sha256(alone)


def test_a_robust_mean_and_verification_have_the_same_bits_by_shared_memory(tmp_path: Path) -> None:
    more: dict[str, Any] = {"robust": "median", "nodes": 3, "verify": 0.5}
    weights = {sha256(train(tmp_path / road, "viewed", road=road, **more)) for road in ("unix", "shared")}
    assert len(weights) == 1


def test_async_mode_learns_with_updates_in_shared_memory(tmp_path: Path) -> None:
    result = train(tmp_path, "viewed", mode="async", batches_per_step=1, steps=16)
    assert result.summary["steps"] == 16
    assert result.summary["bytes_received"] < VIEWED_BYTES_MIN


@pytest.mark.parametrize("size", ["inline", "viewed"])
def test_killed_nodes_leave_no_trace(size: str, by_tcp: Callable[[str], str], tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_another(run: RunStatus) -> None:
        killed.append(next(node.pid for node in run.nodes if node.pid and node.pid not in killed))
        os.kill(killed[-1], signal.SIGKILL)

    actions = dict.fromkeys([2, 4, 6], kill_another)
    result = train(tmp_path, size, nodes=3, callbacks=[AtStep(actions)])
    assert len(killed) == 3
    assert sha256(result) == by_tcp(size)


def test_a_node_that_is_killed_while_it_writes_a_slot_costs_only_its_batches(
    by_tcp: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, died = NodeRegions.slots, tmp_path / "died"

    def dying(self: NodeRegions, vector_bytes: int) -> list[memoryview]:
        found = slots(self, vector_bytes)
        if not died.exists():
            died.touch()
            # Half of a vector, and the flag that says it was sent.
            found[0][: vector_bytes // 2] = b"\xff" * (vector_bytes // 2)
            self.offset_of(found[0])
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    monkeypatch.setattr(NodeRegions, "slots", dying)
    result = train(tmp_path, "viewed")
    assert died.exists()
    assert sha256(result) == by_tcp("viewed")


@pytest.mark.parametrize("size", ["inline", "viewed"])
def test_a_node_that_sleeps_through_steps_answers_for_nothing_it_saw_change(
    size: str, by_tcp: Callable[[str], str], tmp_path: Path
) -> None:
    frozen: list[int] = []

    def freeze(run: RunStatus) -> None:
        frozen.append(pid_of(run, "local-1"))
        os.kill(frozen[0], signal.SIGSTOP)

    def wake(run: RunStatus) -> None:
        os.kill(frozen[0], signal.SIGCONT)

    result = train(tmp_path, size, callbacks=[AtStep({2: freeze, 5: wake})])
    assert frozen
    assert sha256(result) == by_tcp(size)


def test_a_run_goes_on_by_sockets_where_no_region_can_be_made(
    by_tcp: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("w5xde.runtime.system.shared_memory.os.memfd_create", refuse)
    result = train(tmp_path, "viewed")
    assert sha256(result) == by_tcp("viewed")
    told = [event["text"] for event in events(result.folder) if event["kind"] == "no shared memory"]
    assert told == [
        "local nodes share no memory with the coordinator (No space left on device): they use sockets"
    ]


def test_a_node_that_cannot_map_the_memory_uses_its_socket(
    by_tcp: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: NodeRegions, descriptors: list[int]) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(NodeRegions, "__init__", refuse)
    result = train(tmp_path, "viewed")
    assert sha256(result) == by_tcp("viewed")
    assert moved_bytes(result) > VIEWED_BYTES_MIN


@pytest.mark.parametrize("lie", [0, 2**40], ids=["the page of flags", "beyond the end"])
def test_a_node_that_names_a_place_where_no_slot_is_is_evicted(
    lie: int, by_tcp: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lied, offset_of = tmp_path / "lied", NodeRegions.offset_of

    def lying(self: NodeRegions, piece: memoryview) -> int | None:
        place = offset_of(self, piece)
        if place is None or lied.exists():
            return place
        lied.touch()
        return lie

    monkeypatch.setattr(NodeRegions, "offset_of", lying)
    result = train(tmp_path, "viewed")
    assert sha256(result) == by_tcp("viewed")
    left = [event["reason"] for event in events(result.folder) if event["kind"] == "left"]
    assert any("where no slot is" in reason for reason in left)


def test_an_update_that_is_not_finite_is_found_in_its_slot(
    by_tcp: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt, received = [], Updates.received

    def spoil(self: Updates, peer: Any, update: Any, body: Any) -> None:
        if not spoilt and len(body) >= VIEWED_BYTES_MIN:
            spoilt.append(peer.name)
            body[8:12] = b"\x00\x00\xc0\x7f"
        received(self, peer, update, body)

    monkeypatch.setattr(Updates, "received", spoil)
    result = train(tmp_path, "viewed")
    assert sha256(result) == by_tcp("viewed")
    assert [event["node"] for event in events(result.folder) if event["kind"] == "doubt"] == spoilt


def test_a_killed_coordinator_leaves_nothing(tmp_path: Path) -> None:
    with forked(partial(train, tmp_path, "viewed", steps=10**6)) as process:
        wait_until(lambda: len(_mappers(process.pid)) == 3, lambda: process.text)
        nodes = _mappers(process.pid)[1:]
        process.kill()
        _, alive = psutil.wait_procs(nodes, 30)
    assert alive == []
    assert [each for each in Path("/dev/shm").iterdir() if "w5xde" in each.name] == []


def _mappers(pid: int) -> list[psutil.Process]:
    """The process and its descendants that map memory without a name."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        return [each for each in family if "/memfd:w5xde" in Path(f"/proc/{each.pid}/maps").read_text()]
    except (psutil.Error, OSError):
        return []
