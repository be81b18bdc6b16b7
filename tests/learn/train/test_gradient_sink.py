"""The gradient sink: the same vector as gradients that are joined after the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.learn.jobs import Tied
from w5xde.learn.job.job import BatchFailed, Job
from w5xde.learn.model.layout import FlatModel, Vector, describe
from w5xde.learn.train import trainer as trainers
from w5xde.learn.train.gradient_sink import GradientSink
from w5xde.learn.train.trainer import Outcome, Task, Trainer
from w5xde.learn.train.vectors import GradientVectors
from w5xde.messages import Rules
from w5xde.tree import Span

CPU = torch.device("cpu")


class Odd(nn.Module):
    """A parameter that is used twice, one that is not used, a frozen one, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.wide = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.twice(self.twice(inputs)) * self.frozen * self.wide.float()
        return out.square().mean()


def once(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 24).view(4, 6)).backward()


def several_times(model: nn.Module) -> None:
    for _ in range(3):
        once(model)


def by_hand(model: nn.Module) -> None:
    once(model)
    model.get_parameter("twice.bias").grad = torch.full((6,), -0.0)


def transposed(model: nn.Module) -> None:
    once(model)
    model.get_parameter("twice.weight").grad = torch.randn(6, 6, generator=torch.Generator()).t()


def joined(flat: FlatModel) -> tuple[Vector, frozenset[int]]:
    """The gradients that are in the parameters now, as one vector."""
    parameters = [flat.tensors[entry] for entry in flat.blueprint.trained]
    rows = [
        (torch.zeros_like(each) if each.grad is None else each.grad).reshape(1, -1) for each in parameters
    ]
    (vector,) = GradientVectors(flat.blueprint, CPU).join(rows)
    return vector, frozenset(i for i, each in enumerate(parameters) if each.grad is None)


@pytest.mark.parametrize("compute", [once, several_times, by_hand, transposed])
def test_the_vector_is_that_of_gradients_joined_afterwards(compute: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(1)
    module = Odd()
    flat = FlatModel(module, describe(module, set()))
    sink = GradientSink(flat)
    compute(module)
    expected, absent = joined(flat)
    module.zero_grad()
    vector = GradientVectors(flat.blueprint, CPU).take()
    vector.raw.fill_(77)
    sink.open(vector)
    compute(module)
    assert sink.close() == absent
    assert vector.is_same(expected)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_no_gradient_outlives_the_moment_it_was_computed() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    flat = FlatModel(module, describe(module, set()))
    sink = GradientSink(flat)
    vector = GradientVectors(flat.blueprint, CPU).take()
    held: list[int] = []

    def look(parameter: Any) -> None:
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        memory = vector.raw.untyped_storage().data_ptr()
        held.append(sum(each.untyped_storage().data_ptr() != memory for each in gradients))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    sink.open(vector)
    module(torch.ones(2, 8)).sum().backward()
    sink.close()
    assert held == [0] * 8


# --- losses that use gradients themselves ---------------------------------------------------------


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def adversarial(model: nn.Module, batch: Tensor) -> Tensor:
    """Its own backward pass finds a disturbance of the inputs, and leaves no gradients."""
    disturbed = batch.clone().requires_grad_()
    model(disturbed).backward()
    model.zero_grad()
    assert disturbed.grad is not None
    return model(batch + disturbed.grad.sign()) + model(batch)  # type: ignore[no-any-return]


def accumulated(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch).backward()
    return model(batch * 3)  # type: ignore[no-any-return]


def clipped(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return model(batch * 3)  # type: ignore[no-any-return]


def kept(model: nn.Module, batch: Tensor) -> Tensor:
    """The gradients of its own backward pass are constants of the loss."""
    model(batch).backward()
    constants = gradients_of(model)
    model.zero_grad()
    named = [each for name, each in model.named_parameters() if name not in ("unused", "frozen")]
    return model(batch) + sum((a * b).sin().sum() for a, b in zip(named, constants, strict=True))  # type: ignore[no-any-return]


def penalized(model: nn.Module, batch: Tensor) -> Tensor:
    """The norm of a gradient is part of the loss."""
    model(batch).backward(create_graph=True)
    found = gradients_of(model)
    model.zero_grad()
    return model(batch) + sum(each.square().sum() for each in found)  # type: ignore[no-any-return]


def checkpointed(model: nn.Module, batch: Tensor) -> Tensor:
    """Each part has a backward pass of its own inside that of the loss."""
    out = batch.clone().requires_grad_()
    for _ in range(3):
        out = checkpoint(model.get_submodule("twice"), out, use_reentrant=True)
    return out.square().mean()


def computed(loss: Callable[[nn.Module, Tensor], Tensor]) -> Outcome:
    """The update of one batch of half the samples of a step."""
    torch.manual_seed(1)
    module = Odd()
    job = Job(model=Odd, data=list, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    rules = Rules(mode="sync", seed=0, precision="fp32", threads=1, data="stream", recording="off")
    trainer = Trainer(job, FlatModel(module, describe(module, set())), rules, CPU)
    return trainer.compute(Task(0, Span(0, 1), 2, 8, [(0, 4, torch.linspace(-1, 1, 24).view(4, 6))]))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("loss", [adversarial, accumulated, clipped, kept, penalized, checkpointed])
def test_a_loss_may_use_gradients_itself(
    loss: Callable[[nn.Module, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "is_large", lambda count: False)
    expected = computed(loss)
    monkeypatch.setattr(trainers, "is_large", lambda count: True)
    found = computed(loss)
    assert found.vector.is_same(expected.vector)
    assert (found.loss_sum, found.absent) == (expected.loss_sum, expected.absent)


def test_a_failed_batch_leaves_no_gradient_in_a_vector_that_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainers, "is_large", lambda count: True)
    modules: list[nn.Module] = []

    def fails(model: nn.Module, batch: Tensor) -> Tensor:
        modules.append(model)
        disturbed = batch.clone().requires_grad_()
        disturbed.register_hook(lambda gradient: 1 / 0)  # type: ignore[no-untyped-call]
        return model(disturbed)  # type: ignore[no-any-return]

    with pytest.raises(BatchFailed, match="division by zero"):
        computed(fails)
    assert not gradients_of(modules[0])


# --- closed ---------------------------------------------------------------------------------------


def test_a_closed_sink_leaves_gradients_where_torch_puts_them() -> None:
    module = Tied()
    flat = FlatModel(module, describe(module, set()))
    sink = GradientSink(flat)
    sink.open(GradientVectors(flat.blueprint, CPU).take())
    sink.discard()
    next(module.parameters()).sum().backward()  # type: ignore[no-untyped-call]
    assert next(module.parameters()).grad is not None


def test_a_model_is_not_kept_alive_by_its_hooks() -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        module = nn.Linear(2, 2)
        flat = FlatModel(module, describe(module, set()))
        sink = GradientSink(flat)
        gone = weakref.ref(flat)
        del module, flat, sink
        assert gone() is None
    finally:
        gc.enable()
