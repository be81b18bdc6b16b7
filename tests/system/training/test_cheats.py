"""Pools in which some nodes lie, with real processes: nothing of it reaches the model, and they are out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import w5xde
from tests.processes import events
from tests.system import jobs
from tests.system.liars import ALTERNATING, LIES, NOT_FINITE, Lies

NODES, LIARS = 6, 2
SETTINGS: dict[str, Any] = {"epochs": 20, "batch_size": 10, "seed": 5, "log": "silent", "nodes": NODES}


def lies(folder: Path, name: str) -> Lies:
    return Lies(folder, name, jobs.loss, nodes=NODES, liars=LIARS)


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
