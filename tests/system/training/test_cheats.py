"""Pools in which some nodes lie, with real processes: nothing of it reaches the model, and they are out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import w5xde
from tests.processes import HERE, JOBS, Coordinator, coordinator, events, forked
from tests.system import jobs
from tests.system.liars import ALTERNATING, LIES, NOT_FINITE, Lies
from w5xde.errors import JoinError
from w5xde.learn.trust import canary
from w5xde.messages import Hello
from w5xde.runtime.admission import node_pass
from w5xde.runtime.durable.audit import audit_run

NODES, LIARS = 6, 2
SETTINGS: dict[str, Any] = {"epochs": 20, "batch_size": 10, "seed": 5, "log": "silent", "nodes": NODES}


def lies(folder: Path, name: str, *, liars: int = LIARS) -> Lies:
    return Lies(folder, name, jobs.loss, nodes=NODES, liars=liars)


def train(folder: Path, loss: Any, **settings: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    job = w5xde.Job(model=jobs.model, data=jobs.data, loss=loss, optimizer=jobs.optimizer)
    result = w5xde.train(job, runs=str(folder / "runs"), name="run", **SETTINGS | settings)
    return result.summary, events(folder / "runs" / "run")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of an honest pool."""
    result, _ = train(tmp_path_factory.mktemp("clean"), jobs.loss)
    return str(result["weights_sha256"])


# They lie from the beginning: all of a newcomer's first leases are verified, so none of it is applied.
@pytest.mark.parametrize("lie", [lie for lie in LIES if lie != ALTERNATING])
def test_with_verification_the_weights_are_those_of_an_honest_pool(
    lie: str, clean: str, tmp_path: Path
) -> None:
    result, told = train(tmp_path, lies(tmp_path, lie), verify=0.1)
    assert result["weights_sha256"] == clean
    out = {record["node"] for record in told if record["kind"] in ("cheat", "fault")}
    assert len(out) <= LIARS
    assert out


@pytest.mark.parametrize("lie", NOT_FINITE)
def test_what_is_not_finite_never_counts_and_three_times_is_enough(
    lie: str, clean: str, tmp_path: Path
) -> None:
    result, told = train(tmp_path, lies(tmp_path, lie))
    assert result["weights_sha256"] == clean
    assert all(tensor.isfinite().all() for tensor in _weights(tmp_path))
    faults = [record for record in told if record["kind"] == "fault"]
    gone = [r["node"] for r in told if r["kind"] == "left" and "updates were bad" in r["reason"]]
    assert {record["node"] for record in faults if record["faults"] == 3} == set(gone)
    assert len({record["node"] for record in faults}) <= LIARS


def _weights(folder: Path) -> list[Tensor]:
    from safetensors.torch import load_file

    loaded = load_file(folder / "runs" / "run" / "model.safetensors")
    return [tensor for tensor in loaded.values() if tensor.dtype == torch.float32]


def test_an_honest_pool_is_verified_without_anybody_being_blamed(clean: str, tmp_path: Path) -> None:
    result, told = train(tmp_path, jobs.loss, verify=1.0, nodes=3)
    assert result["weights_sha256"] == clean
    assert not {record["kind"] for record in told} & {"cheat", "fault", "doubt"}


def test_an_async_pool_is_verified_too(tmp_path: Path) -> None:
    result, told = train(tmp_path, lies(tmp_path, "sign flipped"), verify=0.5, mode="async")
    assert result["epochs"] == 20
    assert len({record["node"] for record in told if record["kind"] == "cheat"}) <= LIARS
    assert any(record["kind"] == "cheat" for record in told)


# --- a node's own word about its device -----------------------------------------------------------


def join_as_a_gpu(run: Coordinator, monkeypatch: pytest.MonkeyPatch, *, draws: bool = False) -> None:
    """A sign-flipping node that greets as a GPU, and also draws other random numbers if it should."""
    if draws:
        monkeypatch.setattr(canary, "_sketch_draws", lambda _: torch.ones(canary.ROW, dtype=torch.float64))
    monkeypatch.setattr(node_pass, "Hello", lambda **fields: Hello(**fields | {"device": "cuda"}))
    w5xde.join(run.ticket, f"{JOBS}:flipped", node_name="gpu", road="tcp", log="silent")


def test_a_liar_that_calls_itself_a_gpu_is_verified_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator(tmp_path, host=HERE, verify=1.0) as run:
        with forked(lambda: join_as_a_gpu(run, monkeypatch)):
            run.wait_until_recorded("gpu is turned out")
        batches = {node["name"]: node["batches"] for node in run.stop_and_compare(tmp_path)["nodes"]}
    assert batches["gpu"] == 0


def test_a_node_whose_random_numbers_differ_is_refused_by_a_run_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be compared: whether it really is a GPU, or a liar that pretends to draw like one."""
    with coordinator(tmp_path, host=HERE, verify=0.1) as run:
        with pytest.raises(JoinError) as caught:
            join_as_a_gpu(run, monkeypatch, draws=True)
        assert caught.value.code == "W5-214"
        run.wait_until_recorded("gpu was refused")


def test_a_node_whose_random_numbers_differ_takes_part_if_nothing_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator(tmp_path, host=HERE) as run, forked(lambda: join_as_a_gpu(run, monkeypatch, draws=True)):
        run.wait_until_recorded("gpu joined")


# --- everything that is chosen is verified --------------------------------------------------------


def large_model() -> torch.nn.Module:
    """Its parameters are read where they are, and its updates wait at the gate."""
    return torch.nn.Sequential(torch.nn.Linear(10, 20_000), torch.nn.Dropout(0.2), torch.nn.Linear(20_000, 4))


@pytest.mark.parametrize(("model", "epochs"), [(jobs.model, 20), (large_model, 2)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_answer_that_is_chosen_is_verified(mode: str, model: Any, epochs: int, tmp_path: Path) -> None:
    """Also while batches are read late, the model has moved on since a node was given it, or looked ahead."""
    job = w5xde.Job(model=model, data=jobs.data, loss=jobs.loss, optimizer=jobs.optimizer)
    settings = SETTINGS | {"verify": 1.0, "mode": mode, "nodes": 4, "loader_workers": 1, "epochs": epochs}
    result = w5xde.train(job, runs=str(tmp_path / "runs"), name="run", **settings).summary
    told = events(tmp_path / "runs" / "run")
    assert result["epochs"] == epochs
    # More than once, if a batch was lent twice.
    assert result["verified_batches"] >= result["batches"]
    assert result["unverified_batches"] == 0
    assert not {record["kind"] for record in told} & {"cheat", "unverified"}
    assert any(record.get("ahead") for record in told) == (mode == "async")
    assert audit_run(tmp_path / "runs" / "run").is_clean


# --- while nobody knows what is usual -------------------------------------------------------------


class OneLie:
    """A loss that is honest here, and in one node process the first batch of each life is a lie."""

    def __init__(self, folder: Path, factor: float) -> None:
        self._liar = Lies(folder, "zeros", jobs.loss, nodes=0, liars=1)
        self._factor = factor
        self._lies = 1

    def __call__(self, net: torch.nn.Module, batch: Any) -> Tensor:
        loss = jobs.loss(net, batch)
        if self._liar.is_liar(batch) and self._lies:
            self._lies -= 1
            return self._factor * loss + (1 - self._factor) * loss.detach()
        return loss


@pytest.mark.parametrize("nodes", [1, 3])
def test_one_huge_update_of_a_young_run_is_not_believed(nodes: int, clean: str, tmp_path: Path) -> None:
    result, told = train(tmp_path, OneLie(tmp_path, 1e8), nodes=nodes)
    assert result["weights_sha256"] == clean
    # Whoever computed it again, the lie is news.
    assert {record["kind"] for record in told} & {"doubt", "fault"}


def test_one_huge_update_after_a_resume_is_not_believed(clean: str, tmp_path: Path) -> None:
    """Ten times what the first gradient was is far too much by then: what is usual is in the checkpoint."""
    train(tmp_path, jobs.loss, epochs=10)
    job = w5xde.Job(model=jobs.model, data=jobs.data, loss=OneLie(tmp_path, 30.0), optimizer=jobs.optimizer)
    again = w5xde.train(job, runs=str(tmp_path / "runs"), resume="run", nodes=3, epochs=20, log="silent")
    assert again.summary["weights_sha256"] == clean
    assert {record["kind"] for record in events(tmp_path / "runs" / "run")} & {"doubt", "fault"}
