"""Nodes that compute something else than the coordinator, really joining: refused before the first lease."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import w5xde
from tests.learn.layers import Backward, Rough
from tests.processes import HERE, Coordinator, coordinator, forked, node
from tests.system import jobs
from w5xde.errors import JoinError


def model(last: type[nn.Module] = nn.Linear, between: type[nn.Module] = nn.ReLU) -> nn.Module:
    """The run's model if nothing else is said: the same layout in any case."""
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), between(), nn.Dropout(0.2), last(16, 4))


def cannot(net: nn.Module, batch: Any) -> Tensor:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def job(**changes: Any) -> w5xde.Job:
    honest = {"model": model, "data": jobs.data, "loss": jobs.loss, "optimizer": jobs.optimizer}
    return w5xde.Job(**honest | changes)


OTHERS: dict[str, tuple[w5xde.Job, str]] = {
    "another activation": (job(model=lambda: model(between=nn.Tanh)), "the gradient of "),
    "a layer in bfloat16": (job(model=lambda: model(last=Rough)), "the gradient of "),
    "a layer that goes backward": (
        job(model=lambda: model(last=Backward)),
        "the gradient of 4.weight differs",
    ),
    "another loss": (job(loss=lambda net, batch: 2 * jobs.loss(net, batch)), "the gradient of "),
    "a device that fails": (job(loss=cannot), "illegal memory access"),
}


def nodes_of(run: Coordinator, tmp_path: Path) -> dict[str, int]:
    """Who gave how many batches in the whole run, which had the weights that it would have had alone."""
    result = run.stop_and_compare(tmp_path)
    return {node["name"]: node["batches"] for node in result["nodes"]}


def test_who_computes_something_else_is_told_where_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator(tmp_path, host=HERE) as run:
        for at, (other, named) in enumerate(OTHERS.values()):
            name = f"other-{at}"
            # Each a node of its own: one that comes again keeps its name.
            monkeypatch.setenv("W5XDE_STATE", str(tmp_path / name))
            with pytest.raises(JoinError) as caught:
                w5xde.join(run.ticket, other, node_name=name, road="tcp", log="silent")
            assert caught.value.code == "W5-212"
            assert named in caught.value.what
            run.wait_until_recorded(f"{name} did not join" if other.loss is cannot else f"{name} was refused")
            assert named in run.ledger_text()
        assert nodes_of(run, tmp_path).keys() == {"local-1"}


def test_an_honest_node_with_dropout_and_batch_norm_takes_part(tmp_path: Path) -> None:
    with coordinator(tmp_path, host=HERE) as run:
        with node(run.ticket, node_name="honest", road="tcp", log="silent"):
            run.wait_until_recorded("honest joined")
            run.wait_for_step(run.step() + 3)
        assert nodes_of(run, tmp_path)["honest"] > 0


def test_without_a_canary_anybody_of_the_same_layout_is_believed(tmp_path: Path) -> None:
    with coordinator(tmp_path, host=HERE, canary=False) as run:
        settings = {"node_name": "other", "road": "tcp", "log": "silent"}
        with forked(lambda: w5xde.join(run.ticket, job(model=lambda: model(between=nn.Tanh)), **settings)):
            run.wait_until_recorded("other joined")
        run.stop()
