"""Flags and manners: each call is computed with its own loss and flags, and nothing is mixed up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from tests.learn.calls.pools import BATCH, CPU, LOSSES, call, model, node_of, prepared, welcome_of
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import welcome_of as welcome_of_run
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.job.pool_job import PoolJob
from w5xde.learn.train.flags import ModelFlags, from_bits, to_bits
from w5xde.learn.train.manners import CALLS_KEPT
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.message_types import Call
from w5xde.messages import TRAINED
from w5xde.tree import Span


@pytest.mark.parametrize("flags", [[], [False] * 9, [True], [False, True] * 20, [True] * 8])
def test_flags_travel_as_bits(flags: list[bool]) -> None:
    assert from_bits(to_bits(flags), len(flags)) == flags
    assert len(to_bits(flags)) <= (len(flags) + 7) // 8


def test_bits_for_more_flags_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="bits for more than 2 flags"):
        from_bits(b"\x04", 2)


def test_the_flags_of_one_model_make_another_like_it() -> None:
    one, other = model(), model()
    one["d"].eval()
    one["d"][1].train()
    one["g"][0].weight.requires_grad_(False)
    flags = ModelFlags(one, list(one.parameters()))
    ModelFlags(other, list(other.parameters())).set(flags.frozen(), flags.evaluating())
    assert [each.training for each in other.modules()] == [each.training for each in one.modules()]
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in one.parameters()]


def computed(trainer: Trainer, given: Call, value: Any = BATCH) -> list[Tensor]:
    trainer.take_call(given)
    task = Task(0, Span(0, 1), 1, 8, [(0, 8, value)])
    outcome = trainer.compute(task)
    return [part.clone() for part in outcome.vector.parts]


def test_a_recording_of_one_loss_is_never_replayed_for_another() -> None:
    """Both losses have batches of one shape, and are small enough to be recorded."""
    parts = node_of(prepared())
    plain = prepared(recording="off")
    other = node_of(plain)
    for _ in range(12):
        for given in (call("d"), call("g"), call("d", frozen=b"\x01")):
            fast, slow = computed(parts.trainer, given), computed(other.trainer, given)
            assert all(torch.equal(one, two) for one, two in zip(fast, slow, strict=True))
    assert not torch.equal(computed(parts.trainer, call("d"))[0], computed(parts.trainer, call("g"))[0])


def test_only_the_newest_calls_are_kept() -> None:
    trainer = node_of(prepared()).trainer
    for bits in range(1, 3 * CALLS_KEPT):
        computed(trainer, call("d", evaluating=bytes([bits])))
    first = computed(trainer, call("d"))
    assert all(map(torch.equal, first, computed(trainer, call("d"))))


@pytest.mark.parametrize(
    "given",
    [
        None,
        Call("unknown"),
        Call("__class__"),
        Call("d", frozen=bytes(1000) + b"\x01"),
        Call("d", evaluating=b"\xff" * 1000),
    ],
    ids=str,
)
def test_a_call_that_does_not_fit_is_refused_and_changes_nothing(given: Call | None) -> None:
    trainer = node_of(prepared()).trainer
    before = computed(trainer, call("d"))
    with pytest.raises(RemoteProtocolError) as refused:
        trainer.take_call(given)
    assert refused.value.code == "W5-120"
    assert all(map(torch.equal, before, computed(trainer, call("d"))))


def test_a_run_has_no_calls() -> None:
    job = make(mlp())
    trainer = prepare_node(job, welcome_of_run(prepare(job, settings())), CPU).trainer
    trainer.take_call(None)
    with pytest.raises(RemoteProtocolError):
        trainer.take_call(Call("d"))


def test_a_node_takes_over_which_parameters_are_trained() -> None:
    """The script may freeze parameters after its top level, and a node runs none of that."""
    setup = prepared()
    built = model()
    built["g"].requires_grad_(False)
    parts = prepare_node(PoolJob(model=lambda: built, losses=LOSSES), welcome_of(setup), CPU)
    layout = parts.trainer.blueprint.layout
    assert {entry.role for entry in layout.entries if entry.name.startswith("g.")} == {TRAINED}


@pytest.mark.parametrize("losses", [["d", "g", "more"], []])
def test_a_node_needs_all_losses_of_the_pool(losses: list[str]) -> None:
    welcome = welcome_of(prepared())
    rules = msgspec.structs.replace(welcome.rules, losses=losses)
    job = PoolJob(model=model, losses=LOSSES)
    with pytest.raises(JoinError) as refused:
        prepare_node(job, msgspec.structs.replace(welcome, rules=rules), CPU)
    assert refused.value.code == "W5-275"


def test_hooks_of_a_large_models_gradients_survive_a_frozen_call() -> None:
    def large() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 40_000), nn.Linear(40_000, 1))

    losses = {"sum": lambda net, rows: net(rows).sum()}
    trainer = node_of(prepared(large, losses, torch.ones(8, 4)), PoolJob(model=large, losses=losses)).trainer
    whole = computed(trainer, Call("sum"), torch.ones(8, 4))
    frozen = computed(trainer, Call("sum", frozen=b"\x03"), torch.ones(8, 4))
    assert not frozen[0][:160_000].any()
    assert all(map(torch.equal, whole, computed(trainer, Call("sum"), torch.ones(8, 4))))
