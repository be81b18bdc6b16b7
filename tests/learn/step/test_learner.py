"""What the coordinator does with updates: applied whole or not at all, counted once, saved for anybody."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import TensorDataset

from tests.learn import jobs
from tests.learn.jobs import SAMPLES, make, mlp, settings
from tests.learn.pool import CPU, NODE_COUNTS, train_in_pool, welcome_of
from tests.learn.summing import fold, whole_step
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model.digest import weights_sha256
from w5xde.learn.model.layout import Vector
from w5xde.learn.step.checkpoint import model_pieces
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, StepNotFinite
from w5xde.learn.train.trainer import Task
from w5xde.tree import Span


class Every(nn.Module):
    """Every dtype a state dict may hold, tied weights, scalars and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = jobs.Tied()
        self.low = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.wave = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.tied(text) + self.low.sum() + self.wave.abs().sum()


def every_learner() -> Learner:
    return prepare(make(Every, data=jobs.tokens, loss=jobs.foretell), settings()).learner


def test_the_hash_is_over_the_raw_bytes_in_the_order_of_the_state_dict() -> None:
    learner = every_learner()
    digest = hashlib.sha256()
    for tensor in learner.flat.module.state_dict().values():
        # Byte by byte through Python numbers, so that nothing is shared with how it is really done.
        digest.update(bytes(tensor.detach().clone().reshape(-1).view(torch.uint8).tolist()))
    assert learner.weights_sha256() == digest.hexdigest()


def test_the_hash_of_a_known_model_never_changes() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.copy_(torch.tensor([0.5]))
    # 1.0, -2.0 and 0.5 as little-endian float32.
    raw = bytes.fromhex("0000803f000000c00000003f")
    assert weights_sha256(model) == hashlib.sha256(raw).hexdigest()


def test_the_saved_model_can_be_read_without_us(tmp_path: Path) -> None:
    learner = every_learner()
    (tmp_path / "model.safetensors").write_bytes(b"".join(model_pieces(learner.flat.module)))
    saved = load_file(tmp_path / "model.safetensors")
    fresh = Every()
    fresh.load_state_dict(saved, strict=True)
    state = learner.flat.module.state_dict()
    assert list(saved.keys() ^ state.keys()) == []
    assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())
    assert all(value.dtype == state[name].dtype for name, value in saved.items())


def test_a_saved_model_that_was_trained_is_the_trained_one(tmp_path: Path) -> None:
    trained = train_in_pool(make(mlp(lambda: nn.BatchNorm1d(16))), settings(), nodes=2, seed=0)
    (tmp_path / "model.safetensors").write_bytes(b"".join(model_pieces(trained.learner.flat.module)))
    fresh = mlp(lambda: nn.BatchNorm1d(16))()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    assert weights_sha256(fresh) == trained.sha256


# --- a step is applied whole or not at all ------------------------------------------------------


class Helper:
    """Computes what one batch gives as a whole step, on a learner's parameters as they are now."""

    def __init__(self, job: Any) -> None:
        prepared = prepare(job, settings())
        self._trainer = prepare_node(job, welcome_of(prepared), CPU).trainer
        self._batch = prepared.source.read(0, 0)  # type: ignore[union-attr]

    def contribution(self, learner: Learner) -> Contribution:
        self._trainer.load(bytearray(learner.snapshot(whole=True)), whole=True)
        outcome = self._trainer.compute(Task(0, Span(0, 1), 1, 4, [(0, 4, self._batch)]))
        vector = Vector.over(outcome.vector.raw.clone(), learner.flat.blueprint)
        return Contribution(vector, frozenset(outcome.absent), outcome.loss_sum)


def _contribution(learner: Learner, job: Any, spoil: float | None = None) -> Contribution:
    """What one batch gives, with one gradient replaced if asked."""
    contribution = Helper(job).contribution(learner)
    if spoil is not None:
        contribution.vector.parts[0][3] = spoil
    return contribution


@pytest.mark.parametrize("spoil", [torch.nan, torch.inf, -torch.inf])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(spoil: float) -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16)), scheduler=lambda optimizer: StepLR(optimizer, 1))
    prepared = prepare(job, settings(clip_norm=1.0))
    learner = prepared.learner
    learner.apply(whole_step(prepared.sums, 0, _contribution(learner, job)))
    before = learner.weights_sha256()
    optimizer = copy.deepcopy(learner.optimizer.state_dict())
    bad = _contribution(learner, job, spoil)
    assert not learner.gauge.is_finite(bad.vector)
    with pytest.raises(StepNotFinite, match="step 2"):
        whole_step(prepared.sums, 1, bad)
    assert learner.weights_sha256() == before
    assert learner.version == 1
    assert str(learner.optimizer.state_dict()) == str(optimizer)


def test_a_sum_that_overflows_is_found_though_each_part_was_finite() -> None:
    job = make(mlp())
    prepared = prepare(job, settings())
    learner = prepared.learner
    before = learner.weights_sha256()
    for batch in range(2):
        part = _contribution(learner, job, 3e38)
        assert learner.gauge.is_finite(part.vector)
        step = fold(prepared.sums, 0, 2, Span(batch, batch + 1), part)
    with pytest.raises(StepNotFinite):
        prepared.sums.total(step)
    assert learner.weights_sha256() == before


def test_a_snapshot_stays_as_it_is_while_the_model_moves_on() -> None:
    job = make(mlp())
    prepared = prepare(job, settings())
    learner = prepared.learner
    snapshot = learner.snapshot(whole=False)
    before = bytes(snapshot)
    assert learner.snapshot(whole=False) is snapshot
    learner.apply(whole_step(prepared.sums, 0, _contribution(learner, job)))
    assert bytes(snapshot) == before
    assert bytes(learner.snapshot(whole=False)) != before


def test_running_statistics_that_are_applied_late_settle_and_do_not_swing() -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16)))
    prepared = prepare(job, settings())
    learner = prepared.learner
    variance = learner.flat.module.get_buffer("1.running_var")
    lowest = float(variance.min())
    helper = Helper(job)
    late = [helper.contribution(learner) for _ in range(40)]
    for step in range(400):
        # All of them would pull it the same way for forty steps before one sees what the others did.
        learner.apply(whole_step(prepared.sums, step, late.pop(0), staleness=min(step, 40)))
        late.append(helper.contribution(learner))
        lowest = min(lowest, float(variance.min()))
    assert lowest > 0


# --- every sample counts once -------------------------------------------------------------------


class Tally(nn.Module):
    """One number for each sample, which grows by one each time the sample is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))


def _tally_job() -> Any:
    # A sample's loss is minus its number, so its gradient is -1/N in a step of N samples: a rate of N counts.
    sizes = [20, 20, 10]
    return make(
        Tally,
        data=lambda: TensorDataset(torch.arange(SAMPLES)),
        loss=lambda model, batch: -model.counts[batch[0]].mean(),
        optimizer=lambda params: SGD(params, lr=1.0),
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: float(sizes[step % 3])),
    )


@pytest.mark.parametrize("nodes", NODE_COUNTS)
@pytest.mark.parametrize("data", ["stream", "local"])
def test_every_sample_counts_once_in_each_epoch_whatever_is_lost_or_repeated(nodes: int, data: str) -> None:
    trained = train_in_pool(_tally_job(), settings(epochs=3, data=data), nodes=nodes, seed=nodes)
    assert trained.answers["lost"] > 0
    assert trained.answers["late"] > 0
    counts = trained.module.get_parameter("counts").detach()
    torch.testing.assert_close(counts, torch.full_like(counts, 3.0), rtol=0, atol=1e-12)


def large_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(jobs.FEATURES, 600), nn.Linear(600, 600), nn.Linear(600, jobs.CLASSES))


def test_a_state_in_shared_memory_leaves_it_for_a_reader_and_returns() -> None:
    shared = bytearray(4_000_000)
    job = make(large_mlp)

    def place(vector_bytes: int, count: int) -> memoryview:
        return memoryview(shared)[:count]

    prepared, plain = prepare(job, settings(), place), prepare(job, settings())
    learner, other = prepared.learner, plain.learner
    count = learner.flat.blueprint.whole_bytes

    def step(index: int) -> None:
        for each in (prepared, plain):
            vector = each.learner.flat.blueprint.new_vector()
            for part in vector.parts:
                part.fill_(0.1 * (index + 1))
            given = Contribution(vector, frozenset(), 1.0, 1.0)
            each.learner.apply(whole_step(each.sums, index, given))

    def is_there() -> bool:
        return bytes(shared[:count]) == bytes(other.snapshot(whole=True))

    step(0)
    assert is_there()
    reading = learner.read_state(whole=True)
    assert reading is not None
    memory, done = reading
    before = bytes(memory)
    step(1)
    # What is being read does not change, and the state is elsewhere.
    assert bytes(memory) == before
    assert not is_there()
    step(2)
    assert bytes(memory) == before
    done()
    step(3)
    assert is_there()
    assert learner.weights_sha256() == other.weights_sha256()
