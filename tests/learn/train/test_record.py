"""Recorded batches: the same bits as without, for what can be recorded; and nothing else is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, make, mlp, settings
from tests.learn.pool import CPU, train_in_pool, welcome_of
from tests.processes import run_python
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.job import BatchFailed, Job
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.train.recording import fast_path, record
from w5xde.learn.train.trainer import Outcome, Task, Trainer
from w5xde.tree import Span


@pytest.fixture(autouse=True)
def anything_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a batch takes on a busy machine shall not decide what is tested."""
    monkeypatch.setattr(fast_path, "SMALL_SECONDS", 60.0)


def trainer_of(job: Job, **given: Any) -> Trainer:
    prepared = prepare(job, settings(**given))
    trainer = prepare_node(job, welcome_of(prepared), CPU).trainer
    trainer.load(bytearray(prepared.learner.snapshot(whole=True)), whole=True)
    return trainer


def batch_of(number: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(rows, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)


def compute(trainer: Trainer, *batches: Any, rows: int = 4) -> Outcome:
    listed = [(i, rows, batch) for i, batch in enumerate(batches)]
    return trainer.compute(Task(0, Span(0, len(batches)), 8, 8 * rows, listed))


def calls_of_loss(job: Job, run: Callable[[Job], None]) -> int:
    """How often the user's loss is called while this runs."""
    calls: list[None] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(None)
        return job.loss(model, batch)

    run(Job(model=job.model, data=job.data, loss=loss, optimizer=job.optimizer))
    return len(calls)


def frozen_first() -> nn.Module:
    model = mlp()()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


class Unused(nn.Module):
    """One of its layers takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.used(inputs)
        return result


class InPlace(nn.Module):
    """Writes into what it has computed itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden = hidden.relu_().mul(2.0)
        joined = torch.cat([hidden, hidden.flip(1)], 1)[:, :16]
        result: Tensor = self.second(joined)
        return result


class Slices(nn.Module):
    """Looks at its input in pieces, turned round, and writes into none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 16), nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        left, right = inputs.split([3, FEATURES - 3], dim=1)
        turned = right.t().reshape(-1, inputs.shape[0]).t()
        result: Tensor = self.second((self.first(left) + turned[:, :1]).relu())
        return result


class Empty(nn.Module):
    """One of its parameters has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.none = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(2, 0))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs) + self.none.sum()
        return result


RECORDED = {
    "an empty parameter": Empty,
    "pieces of the input": Slices,
    "plain": mlp(),
    "tanh": mlp(nn.Tanh),
    "layer norm": mlp(lambda: nn.LayerNorm(16)),
    "a layer twice": mlp(lambda: nn.Linear(16, 16), nn.Sigmoid),
    "frozen": frozen_first,
    "unused": Unused,
    "in place": InPlace,
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_batch_has_the_bits_of_one_that_is_not(name: str) -> None:
    job = make(RECORDED[name])
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for number in range(40):
        ours, theirs = compute(quick, batch_of(number)), compute(plain, batch_of(number))
        assert ours.vector.is_same(theirs.vector)
        assert (ours.loss_sum, ours.absent) == (theirs.loss_sum, theirs.absent)


@pytest.mark.parametrize("name", RECORDED)
def test_the_loss_is_hardly_ever_called_once_it_is_recorded(name: str) -> None:
    def run(job: Job) -> None:
        trainer = trainer_of(job)
        for number in range(500):
            compute(trainer, batch_of(number))

    # The trial's, the first two, those that are compared at first, and 8, 16, 32, 64, 128, 256.
    assert calls_of_loss(make(RECORDED[name]), run) <= 20


def test_one_that_would_keep_much_memory_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULT_BYTES_MAX", 1000)
    trainer = trainer_of(make(mlp()))
    plain = trainer_of(make(mlp()), recording="off")
    for number in range(9):
        ours, theirs = compute(trainer, batch_of(number)), compute(plain, batch_of(number))
        assert ours.vector.is_same(theirs.vector)

    def run(job: Job) -> None:
        trainer = trainer_of(job)
        for number in range(50):
            compute(trainer, batch_of(number))

    assert calls_of_loss(make(mlp()), run) > 50


def test_each_shape_has_its_own_and_many_shapes_are_computed_as_always() -> None:
    quick, plain = trainer_of(make(mlp())), trainer_of(make(mlp()), recording="off")
    for number in range(120):
        rows = 1 + number % 24
        ours = compute(quick, batch_of(number, rows), rows=rows)
        theirs = compute(plain, batch_of(number, rows), rows=rows)
        assert ours.vector.is_same(theirs.vector)


def test_a_span_of_recorded_batches_is_added_in_the_canonical_tree() -> None:
    quick, plain = trainer_of(make(mlp())), trainer_of(make(mlp()), recording="off")
    for number in range(10):
        batches = [batch_of(8 * number + i) for i in range(8)]
        assert compute(quick, *batches).vector.is_same(compute(plain, *batches).vector)


def test_new_parameters_are_used_at_once() -> None:
    job = make(mlp())
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for number in range(12):
        raw = bytearray(prepare(job, settings(seed=number)).learner.snapshot(whole=True))
        quick.load(bytearray(raw), whole=True)
        plain.load(raw, whole=True)
        ours, theirs = compute(quick, batch_of(number)), compute(plain, batch_of(number))
        assert ours.vector.is_same(theirs.vector)


def test_a_whole_training_has_the_same_weights_with_and_without() -> None:
    job = make(mlp())
    quick = train_in_pool(job, settings(epochs=4), nodes=3, seed=1)
    plain = train_in_pool(job, settings(epochs=4, recording="off"), nodes=1, seed=2)
    assert quick.sha256 == plain.sha256


# --- what must not be recorded --------------------------------------------------------------------


class Remembers(nn.Module):
    """Keeps the last batch, and uses it for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        before = self.last if self.last is not None else inputs
        self.last = inputs.detach()
        result: Tensor = self.layer(inputs + 0.1 * before)
        return result


RARE = {12, 13, 20}  # none of them is compared with the real thing


def rarely_shorter(number: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs, labels = batch_of(number)
    lengths = torch.full((len(labels),), 3 if number in RARE else FEATURES)
    return inputs, labels, lengths


def by_lengths(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels, lengths = batch
    rows = [row * (torch.arange(FEATURES) < n) for row, n in zip(inputs, lengths.tolist(), strict=True)]
    return cross_entropy(model(torch.stack(rows)), labels)


def by_lengths_of_numpy(model: nn.Module, batch: Any) -> Tensor:
    factor = 2.0 if np.asarray(batch[2]).min() < FEATURES else 1.0
    return factor * cross_entropy(model(batch[0]), batch[1])


def by_lengths_in_spite_of_all(model: nn.Module, batch: Any) -> Tensor:
    try:
        factor = batch[2].min().item()
    except Exception:  # whoever watches is not heard
        factor = FEATURES
    return factor * cross_entropy(model(batch[0]), batch[1])


def split_by_lengths(model: nn.Module, batch: Any) -> Tensor:
    first, second = torch.tensor_split(batch[0], batch[2][:1] // 2)
    return cross_entropy(model(torch.cat([2 * first, second])), batch[1])


@pytest.mark.parametrize(
    "loss", [by_lengths, by_lengths_of_numpy, by_lengths_in_spite_of_all, split_by_lengths]
)
def test_what_python_sees_of_a_batch_once_in_a_while_is_not_missed(loss: Any) -> None:
    job = make(mlp(), loss=lambda model, batch: loss(model, batch if len(batch) > 2 else rarely_shorter(0)))
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for number in range(24):
        ours, theirs = (compute(each, rarely_shorter(number)) for each in (quick, plain))
        assert ours.vector.is_same(theirs.vector), number


def product(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).sigmoid().prod(1).sum()  # type: ignore[no-any-return]


def quantile(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).quantile(0.5)  # type: ignore[no-any-return]


def squeezed(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).mul(2).unsqueeze(0).contiguous().squeeze_(0).sum()  # type: ignore[no-any-return]


def in_chunks(model: nn.Module, batch: Any) -> Tensor:
    (chunk,) = torch.unsafe_chunk(model(batch[0]).relu(), 1)
    return chunk.sum()


def sign(model: nn.Module, batch: Any) -> Tensor:
    hidden = model(batch[0])
    return (torch.sgn(hidden) * hidden).sum()


@pytest.mark.parametrize("loss", [product, quantile, squeezed, in_chunks, sign])
def test_kernels_that_behave_otherwise_when_watched_or_repeated_are_computed_as_always(loss: Any) -> None:
    job = make(mlp(), loss=loss)
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for number in range(24):
        ours, theirs = compute(quick, batch_of(number)), compute(plain, batch_of(number))
        assert ours.vector.is_same(theirs.vector), number


class Clamped(nn.Module):
    """Two parameters that share a gradient, of which a hook changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.one, self.other = nn.Parameter(torch.ones(FEATURES)), nn.Parameter(torch.ones(FEATURES))
        self.one.register_post_accumulate_grad_hook(_clamp)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(inputs * (self.one + self.other))
        return result


def _clamp(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.clamp_(-0.5, 0.5)


def test_a_hook_that_writes_into_a_gradient_writes_into_no_other() -> None:
    job = make(Clamped)
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for number in range(24):
        inputs, labels = batch_of(number)
        batch = (inputs * (300 if number in RARE else 0.01), labels)
        assert compute(quick, batch).vector.is_same(compute(plain, batch).vector), number


def read_back(model: nn.Module, batch: Any) -> Tensor:
    factor = 2.0 if batch[0].sum().item() > 0 else 1.0
    return factor * cross_entropy(model(batch[0]), batch[1])


def read_by_numpy(model: nn.Module, batch: Any) -> Tensor:
    factor = 2.0 if batch[0].numpy().sum() > 0 else 1.0
    return factor * cross_entropy(model(batch[0]), batch[1])


def with_new_constant(model: nn.Module, batch: Any) -> Tensor:
    return torch.tensor(float(len(batch[1]))) * cross_entropy(model(batch[0]), batch[1])


UNFIT: dict[str, Job] = {
    "dropout": make(mlp(lambda: nn.Dropout(0.5))),
    "batch norm": make(mlp(lambda: nn.BatchNorm1d(16))),
    "python's chance": make(mlp(), loss=jobs.drop_at_random),
    "a value that Python reads": make(mlp(), loss=read_back),
    "a value that Python reads past torch": make(mlp(), loss=read_by_numpy),
    "a tensor from nowhere": make(mlp(), loss=with_new_constant),
    "a loss of shape one": make(mlp(), loss=lambda model, batch: jobs.classify(model, batch).reshape(1)),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_unfit_is_computed_as_always(name: str) -> None:
    job = UNFIT[name]
    quick, plain = trainer_of(job), trainer_of(job, recording="off")
    for number in range(30):
        ours, theirs = compute(quick, batch_of(number)), compute(plain, batch_of(number))
        assert ours.vector.is_same(theirs.vector)
        assert ours.loss_sum == theirs.loss_sum


def test_a_model_that_remembers_is_computed_as_always() -> None:
    job = make(Remembers)
    quick = trainer_of(job, mode="async")
    plain = trainer_of(job, mode="async", recording="off")
    differing = 0
    for number in range(30):
        ours, theirs = compute(quick, batch_of(number)), compute(plain, batch_of(number))
        differing += not ours.vector.is_same(theirs.vector)
    # The batch that was watched in vain was computed twice, and so remembered twice.
    assert differing <= 1


def test_a_loss_that_changes_its_mind_later_is_told_and_not_believed() -> None:
    factor = 1.0
    chance = random.Random(3)

    def moody(model: nn.Module, batch: Any) -> Tensor:
        return factor * cross_entropy(model(batch[0]), batch[1])

    trainer = trainer_of(make(mlp(), loss=moody))
    for _ in range(20):
        compute(trainer, batch_of(chance.randrange(1000)))
    factor = 2.0

    def go_on() -> None:
        for _ in range(20):
            compute(trainer, batch_of(chance.randrange(1000)))

    with pytest.raises(BatchFailed, match=r"no longer the function.*--recording off"):
        go_on()
    # From then on it is called again.
    plain = trainer_of(make(mlp(), loss=moody), recording="off")
    assert compute(trainer, batch_of(5)).vector.is_same(compute(plain, batch_of(5)).vector)


def test_a_loss_that_is_not_finite_fails_though_it_is_recorded() -> None:
    trainer = trainer_of(make(mlp()))
    for number in range(10):
        compute(trainer, batch_of(number))
    inputs, labels = batch_of(11)
    with pytest.raises(BatchFailed, match="the loss of batch 0 is nan"):
        compute(trainer, (inputs * torch.nan, labels))
    assert compute(trainer, batch_of(1)).loss_sum > 0


def test_a_batch_that_fails_while_it_is_watched_is_watched_again() -> None:
    trainer = trainer_of(make(mlp()))
    compute(trainer, batch_of(0))
    inputs, labels = batch_of(1)
    with pytest.raises(BatchFailed):
        compute(trainer, (inputs, labels + 1000))
    plain = trainer_of(make(mlp()), recording="off")
    for number in range(10):
        assert compute(trainer, batch_of(number)).vector.is_same(compute(plain, batch_of(number)).vector)


def test_watching_a_batch_does_not_load_torchs_compiler() -> None:
    script = (
        "import sys; from tests.learn.train import test_record as t\n"
        "trainer = t.trainer_of(t.make(t.mlp()))\n"
        "for i in range(9): t.compute(trainer, t.batch_of(i))\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
