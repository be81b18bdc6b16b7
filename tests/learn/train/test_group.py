"""Batches computed together have the bits of batches computed one by one; what would not is not grouped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, nll_loss

from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, make, mlp
from tests.learn.train.test_record import RECORDED, batch_of, trainer_of
from w5xde.learn.job.job import BatchFailed, Job
from w5xde.learn.model.rows import Block, Row
from w5xde.learn.torch_private import KernelCall
from w5xde.learn.train.recording import fast_path, kernel_steps
from w5xde.learn.train.recording.replay import COMPARED_EVERY, Replay
from w5xde.learn.train.trainer import Outcome, Task, Trainer
from w5xde.learn.train.vectors import BLOCK_ROWS
from w5xde.tree import Span

ALONE = Span(0, 1)


@pytest.fixture(autouse=True)
def anything_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a batch takes on a busy machine shall not decide what is tested."""
    monkeypatch.setattr(fast_path, "SMALL_SECONDS", 60.0)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of batches of each group, without those of trials."""
    found: list[int] = []
    run, agrees_with = Replay.run, Replay.agrees_with

    def counted(self: Replay, batches: Any, scale: Tensor) -> tuple[list[float], list[Tensor]]:
        if self.size > 1:
            found.append(len(batches))
        return run(self, batches, scale)

    def tried(self: Replay, single: Replay) -> bool:
        before = len(found)
        try:
            return agrees_with(self, single)
        finally:
            del found[before:]

    monkeypatch.setattr(Replay, "run", counted)
    monkeypatch.setattr(Replay, "agrees_with", tried)
    return found


def frame(first: int, count: int, rows: int) -> list[Task]:
    return [Task(0, ALONE, 1, rows, [(i, rows, batch_of(i, rows))]) for i in range(first, first + count)]


def computed(trainer: Trainer, tasks: list[Task]) -> list[Outcome]:
    trainer.compute_together(tasks)
    return [trainer.compute(task) for task in tasks]


def require_same(job: Job, counts: list[int], rows: int = 4) -> None:
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    first = 0
    for count in counts:
        tasks = frame(first, count, rows)
        first += count
        for ours, theirs in zip(computed(quick, tasks), computed(plain, tasks), strict=True):
            assert ours.vector.is_same(theirs.vector)
            assert (ours.loss_sum, ours.absent) == (theirs.loss_sum, theirs.absent)
            quick.recycle(ours.vector)


def regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, classes = batch
    return mse_loss(model(inputs)[:, 0], classes.float())


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, classes = batch
    return nll_loss(model(inputs).log_softmax(1), classes, reduction="sum") * 0.01


MODELS: dict[str, Callable[[], nn.Module]] = {
    **RECORDED,
    "gelu": mlp(nn.GELU),
    "softmax": mlp(lambda: nn.Softmax(1)),
    "convolution": mlp(lambda: nn.Unflatten(1, (4, 4)), lambda: nn.Conv1d(4, 4, 3, padding=1), nn.Flatten),
    "attention": mlp(
        lambda: nn.Unflatten(1, (4, 4)), lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), nn.Flatten
    ),
}


@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("name", MODELS)
def test_grouped_batches_have_the_bits_of_batches_one_by_one(name: str, rows: int) -> None:
    require_same(make(MODELS[name]), [6, 16, 16, 3, 2, 16, 16, 1, 23, 16], rows)


@pytest.mark.parametrize("loss", [regression, summed])
def test_other_losses_have_them_too(loss: Callable[..., Tensor], groups: list[int]) -> None:
    job = make(mlp())
    require_same(Job(model=job.model, data=job.data, loss=loss, optimizer=job.optimizer), [8, 16, 16, 16])
    assert groups


def test_what_is_known_is_called_once_for_all(groups: list[int]) -> None:
    trainer = trainer_of(make(mlp()))
    for first in range(0, 10 * BLOCK_ROWS, BLOCK_ROWS):
        for outcome in computed(trainer, frame(first, BLOCK_ROWS, 32)):
            trainer.recycle(outcome.vector)
    # The first frame is watched and compared one by one.
    assert groups == [BLOCK_ROWS] * 9


def test_a_lease_of_several_batches_is_added_in_the_same_tree() -> None:
    job = make(mlp())
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for first in range(0, 96, 16):
        for count in (16, 11):
            listed = [(i, 4, batch_of(i)) for i in range(first, first + count)]
            task = Task(0, Span(0, count), count, 4 * count, listed)
            (ours,), (theirs,) = computed(quick, [task]), computed(plain, [task])
            assert ours.vector.is_same(theirs.vector)
            assert ours.loss_sum == theirs.loss_sum
            quick.recycle(ours.vector)


def test_a_kernel_that_rounds_otherwise_for_many_is_found_out(
    monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    right = kernel_steps._RULES[torch.ops.aten.addmm.default]

    def rounds(call: KernelCall) -> Any:
        steps = right(call)
        assert steps is not None
        # Only in the last place of a group.
        return [*steps, lambda: call.results[0].all[-1].mul_(1 + 1e-6)]

    monkeypatch.setitem(kernel_steps._RULES, torch.ops.aten.addmm.default, rounds)
    # Before it computes anything; and if it were not tried, when the last place is looked at the first time.
    require_same(make(mlp()), [8, 8, 8, 8, 8, 8, 16, 16, 16])
    assert not groups
    monkeypatch.setattr(Replay, "agrees_with", lambda self, single: True)
    require_same(make(mlp()), [8, 8, 8, 8, 8, 8, 16, 16, 16])
    assert groups == [8] * 5 + [16]


def test_a_group_that_was_believed_and_is_wrong_fails_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(make(mlp()))
    run = Replay.run
    for first in range(0, 80, 16):
        computed(trainer, frame(first, 16, 4))

    def wrong(self: Replay, batches: Any, scale: Tensor) -> tuple[list[float], list[Tensor]]:
        losses, gradients = run(self, batches, scale)
        return losses, [each + 1e-3 for each in gradients] if self.size > 1 else gradients

    monkeypatch.setattr(Replay, "run", wrong)

    def go_on() -> None:
        for first in range(80, 80 + 16 * COMPARED_EVERY, 16):
            computed(trainer, frame(first, 16, 4))

    with pytest.raises(BatchFailed, match="no longer the function"):
        go_on()


@pytest.mark.parametrize("singles", [6, 7, 8, 16])
def test_a_loss_that_changes_is_reported_however_few_batches_were_computed_alone(singles: int) -> None:
    factor = 1.0

    def moody(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return factor * jobs.classify(model, batch)

    trainer = trainer_of(make(mlp(), loss=moody))
    computed(trainer, frame(0, singles, 4))
    for first in range(16, 112, 16):
        computed(trainer, frame(first, 16, 4))
    factor = 2.0

    def go_on() -> None:
        for first in range(112, 112 + 16 * COMPARED_EVERY, 16):
            computed(trainer, frame(first, 16, 4))

    with pytest.raises(BatchFailed, match="no longer the function"):
        go_on()


def test_the_fast_path_has_one_method() -> None:
    assert [name for name in vars(fast_path.FastPath) if not name.startswith("_")] == ["compute"]


def test_a_batch_that_fails_fails_alone() -> None:
    trainer = trainer_of(make(mlp()))
    for first in range(0, 80, 16):
        computed(trainer, frame(first, 16, 4))
    tasks = frame(80, 8, 4)
    inputs, classes = tasks[3].batches[0][2]
    tasks[3].batches = [(83, 4, (inputs * float("nan"), classes))]
    trainer.compute_together(tasks)
    for i, task in enumerate(tasks):
        if i == 3:
            with pytest.raises(BatchFailed, match="nan"):
                trainer.compute(task)
        else:
            trainer.compute(task)


def test_batches_of_several_shapes_and_weights_are_grouped_apart(groups: list[int]) -> None:
    job = make(mlp())
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for first in range(0, 96, 12):
        tasks = frame(first, 6, 4) + frame(first + 6, 6, 8)
        tasks[0] = Task(0, ALONE, 2, 8, tasks[0].batches)
        for ours, theirs in zip(computed(quick, tasks), computed(plain, tasks), strict=True):
            assert ours.vector.is_same(theirs.vector)
    assert set(groups) == {5, 6}


def test_large_batches_are_not_grouped(monkeypatch: pytest.MonkeyPatch, groups: list[int]) -> None:
    monkeypatch.setattr(fast_path, "GROUP_BYTES_MAX", 1000)
    require_same(make(mlp()), [8, 16, 16])
    assert not groups


def test_what_was_computed_ahead_and_not_asked_for_is_forgotten(groups: list[int]) -> None:
    job = make(mlp())
    trainer, plain = trainer_of(job), trainer_of(job, recording="off")
    for first in range(0, 80, 16):
        computed(trainer, frame(first, 16, 4))
    tasks = frame(80, 4, 4)
    trainer.compute_together(tasks)
    assert groups[-1] == 4
    trainer.compute_together([])
    for task in tasks:
        inputs, _ = task.batches[0][2]
        inputs.mul_(2)
        assert trainer.compute(task).vector.is_same(plain.compute(task).vector)


def test_a_block_is_used_again_when_all_of_it_is_back() -> None:
    block = Block(trainer_of(make(mlp())).blueprint, 4)
    rows: list[Row] = block.give(2)
    block.take_back(rows[0])
    assert not block.is_free
    block.take_back(rows[1])
    assert block.is_free


class Zeroed(nn.Module):
    """Begins with zeros, behind which every difference hides."""

    def __init__(self, between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(FEATURES, 5), between(), nn.Linear(5, CLASSES)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.between(self.first(inputs)))
        return result


@pytest.mark.parametrize("rows", [3, 8, 17, 33])
@pytest.mark.parametrize("between", [nn.Sigmoid, nn.SiLU, nn.Softplus, nn.ELU, nn.GELU, nn.Tanh])
def test_a_model_that_begins_with_zeros_has_the_same_bits_afterwards(
    between: Callable[[], nn.Module], rows: int
) -> None:
    job = make(lambda: Zeroed(between))
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for first in range(0, 96, 16):
        computed(quick, frame(first, 16, rows))
    weights = bytearray(torch.randn(quick.blueprint.whole_bytes // 4).numpy().tobytes())
    for trainer in (quick, plain):
        trainer.load(weights, whole=True)
    for first in range(96, 256, 16):
        tasks = frame(first, 16, rows)
        for ours, theirs in zip(computed(quick, tasks), computed(plain, tasks), strict=True):
            assert ours.vector.is_same(theirs.vector)
            quick.recycle(ours.vector)


def test_trying_a_group_leaves_the_weights_as_they_are() -> None:
    job = make(mlp())
    trainer = trainer_of(job)
    before = [parameter.detach().clone() for parameter in trainer.module.parameters()]
    for first in range(0, 64, 16):
        computed(trainer, frame(first, 16, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.module.parameters(), strict=True))
