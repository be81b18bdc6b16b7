"""The canary: honest nodes pass whatever they train, and what computes something else is named."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, make, mlp, settings
from tests.learn.layers import Backward, Deaf, Rough
from tests.learn.pool import CPU, welcome_of, wrong_with
from w5xde import Job
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.model.layout import FlatModel, describe
from w5xde.learn.model.seeding import seed_everything
from w5xde.learn.train.trainer import Task, Trainer
from w5xde.learn.trust import canary_weights
from w5xde.learn.trust.canary import ROUNDING, SAMPLES, ExpectedCanary
from w5xde.learn.trust.sketch import ROW, sketch
from w5xde.message_types import Fill
from w5xde.tree import Span

# --- the formula ----------------------------------------------------------------------------------


def filled(module: nn.Module, nudge: float = 0.0) -> FlatModel:
    flat = FlatModel(module, describe(module, set()))
    canary_weights.write(flat, canary_weights.fills_of(flat), nudge=nudge)
    return flat


def test_weights_by_the_formula_are_of_the_size_that_the_models_own_have():
    module = nn.Linear(300, 400)
    before = module.weight.detach().clone()
    filled(module)
    after = module.weight.detach()
    assert not torch.equal(before, after)
    assert float(after.mean()) == pytest.approx(float(before.mean()), abs=1e-3)
    assert float(after.std()) == pytest.approx(float(before.std()), rel=0.02)
    assert before.min() <= after.min()
    assert after.max() <= before.max()
    # No two rows are alike: a weight longer than the table would else have too low a rank.
    assert torch.linalg.matrix_rank(after) == 300


def test_they_depend_on_the_four_numbers_alone_and_are_these_on_every_machine():
    one, other = nn.Linear(7, 70_000), nn.Linear(7, 70_000)
    for module in (one, other):
        flat = FlatModel(module, describe(module, set()))
        canary_weights.write(flat, [Fill(0.5, 2.0, -1.0, 3.0), Fill(0.0, 1e-3, -1.0, 1.0)])
    assert torch.equal(one.weight, other.weight)
    raw = one.weight.detach().numpy().tobytes() + one.bias.detach().numpy().tobytes()
    assert hashlib.sha256(raw).hexdigest() == FILLED


FILLED = "87e99562755d51bafc85b97d21ae63392e0693a4a3470b187826b8ca974f7bbd"


def test_what_is_constant_when_it_is_built_is_spread_if_it_is_trained():
    module = nn.BatchNorm1d(50)
    nn.init.constant_(module.weight, 2.0)
    filled(module)
    weight = module.weight.detach()
    assert float(weight.std()) == pytest.approx(0.1, rel=0.2)
    assert float(weight.min()) > 1.5
    assert 0.01 < float(module.bias.detach().abs().max()) < 0.05
    # A buffer stays what it is.
    assert torch.equal(module.running_mean, torch.zeros(50))


def test_a_frozen_constant_stays_one_and_what_has_no_mean_stays_as_it_was_built():
    module = nn.Module()
    module.scale = nn.Parameter(torch.full((9,), 3.0), requires_grad=False)
    module.mask = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
    module.index = nn.Parameter(torch.arange(4), requires_grad=False)
    module.wave = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    wave = module.wave.detach().clone()
    filled(module)
    assert module.scale.tolist() == [3.0] * 9
    assert module.mask.tolist() == [0.0, -math.inf]
    assert module.index.tolist() == [0, 1, 2, 3]
    assert not torch.equal(module.wave, wave)
    assert module.wave.imag.abs().max() > 0


def test_a_nudge_moves_every_value_by_that_part_of_itself():
    torch.manual_seed(0)
    plain = filled(nn.Linear(50, 50)).state.view(torch.float32).clone()
    torch.manual_seed(0)
    moved = filled(nn.Linear(50, 50), nudge=2.0**-10).state.view(torch.float32)
    known = plain != 0
    ratio = (moved[known] / plain[known] - 1).abs()
    assert ratio.tolist() == pytest.approx([2.0**-10] * len(ratio), rel=1e-3)


# --- the sketch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (5000,), (64, 513), (300, 4099), (1_100_000,)])
def test_a_sketch_says_how_large_a_tensor_and_a_difference_is(shape):
    generator = torch.Generator().manual_seed(1)
    one, change = (torch.randn(shape, generator=generator) for _ in range(2))
    first, second = sketch(one), sketch(one + 0.01 * change)
    assert float(first[0]) == pytest.approx(float(one.double().norm()), rel=1e-9)
    apart = float((first[1:] - second[1:]).norm())
    real = 0.01 * float(change.double().norm())
    assert 0.3 * real < apart < 2.5 * real


def test_what_adds_up_to_nothing_over_classes_is_seen_all_the_same():
    """As the gradient of a softmax's last layer does: plain sums of it would all be zero."""
    gradient = torch.randn(10, 64, generator=torch.Generator().manual_seed(2))
    gradient -= gradient.mean(0)
    assert float(sketch(gradient)[1:].norm()) > 0.3 * float(gradient.norm())


def test_what_all_points_one_way_is_not_made_large():
    assert float(sketch(torch.ones(1000, 1000))[1:].norm()) < 2.5 * 1000


def test_a_sketch_of_nothing_of_complex_numbers_and_of_pieces():
    assert sketch(None).tolist() == sketch(torch.zeros(0)).tolist() == [0.0] * ROW
    wave = torch.complex(torch.arange(9.0), -torch.arange(9.0))
    assert torch.equal(sketch(wave), sketch(torch.view_as_real(wave)))
    assert torch.equal(sketch(wave.conj()), sketch(wave.conj().resolve_conj()))
    wide = torch.randn(20, 30)
    assert torch.equal(sketch(wide.t()), sketch(wide.t().contiguous()))


def test_a_sketch_is_the_same_on_every_machine():
    row = sketch((torch.arange(300_000) % 1000).double() - 500)
    assert hashlib.sha256(row[1:].round().long().numpy().tobytes()).hexdigest() == SKETCHED


SKETCHED = "23082c869547bd01d56aa8062e1f3836749edae6ea8303db63c5af9dc27e626a"

# --- honest nodes ---------------------------------------------------------------------------------


def parts_of(job: Job, prepared: Prepared) -> NodeParts:
    return prepare_node(job, welcome_of(prepared), CPU)


class Precise(nn.Module):
    """Something with kinks and running statistics, in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, CLASSES)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.body(numbers.to(self.head.weight.dtype))).float()


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (Precise, {}),
        (lambda: Precise().to(torch.bfloat16), {}),
        (lambda: Precise().double(), {}),
        (mlp(lambda: nn.Dropout(0.4)), {}),
        (jobs.Memories, {}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_honest_node_passes(model: Any, more: Any, precision: str):
    prepared = prepare(make(model, **more), settings(precision=precision))
    assert wrong_with(parts_of(make(model, **more), prepared), prepared) == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_node_that_rounds_otherwise_passes(seed: int):
    """In double precision: further from single than any honest machine is from another."""
    job = make(jobs.convolutions, data=jobs.images)
    prepared = prepare(job, settings(seed=seed))
    parts = parts_of(job, prepared)
    doubled = make(jobs.convolutions, data=jobs.images, loss=in_double)
    computes_with(parts, lambda trainer: setattr(trainer, "_job", doubled))
    assert wrong_with(parts, prepared) == ""
    assert parts.proof is not None


def computes_with(parts: NodeParts, change: Callable[[Trainer], None]) -> None:
    """From now on the canary is computed by a trainer that was changed."""
    make_trainer = parts.make_trainer

    def changed() -> Trainer:
        trainer = make_trainer()
        change(trainer)
        return trainer

    parts.make_trainer = changed


def in_double(model: nn.Module, batch: Any) -> Tensor:
    doubled = {name: each.double() for name, each in model.named_parameters()}
    doubled |= {n: each.double() if each.is_floating_point() else each for n, each in model.named_buffers()}
    numbers, labels = batch
    return cross_entropy(torch.func.functional_call(model, doubled, (numbers.double(),)), labels).float()


def test_a_node_that_comes_again_after_it_has_trained_passes_again():
    """Its parameters, and counters among its buffers, are others by then."""
    job = make(mlp(lambda: nn.BatchNorm1d(16, momentum=None)))
    prepared = prepare(job, settings())
    parts = parts_of(job, prepared)
    assert wrong_with(parts, prepared) == ""
    learner = prepared.learner
    learner.flat.state.view(torch.uint8)[: learner.vector_bytes // 2] = 7
    parts.trainer.load(bytearray(learner.snapshot(whole=True)), whole=True)
    assert wrong_with(parts, prepared) == ""


def test_after_the_canary_a_node_computes_the_bits_that_it_would_have_computed_without():
    job = make(mlp(lambda: nn.BatchNorm1d(16), lambda: nn.Dropout(0.3)))
    prepared = prepare(job, settings())
    state = bytearray(prepared.learner.snapshot(whole=True))
    found = []
    for proves in (False, True):
        parts = parts_of(job, prepared)
        seed_everything(11)
        if proves:
            assert wrong_with(parts, prepared) == ""
        drawn = (torch.rand(3).tolist(), random.random(), np.random.rand())  # noqa: NPY002
        parts.trainer.load(bytearray(state), whole=True)
        batch = prepared.source.first(4)
        given = parts.trainer.compute(Task(0, Span(0, 1), 1, 4, [(0, 4, batch)]))
        found.append((given.vector, (given.loss_sum, drawn)))
    (one, loss), (other, other_loss) = found
    assert one.is_same(other)
    assert loss == other_loss


def test_the_coordinator_is_the_same_with_and_without_a_canary():
    states = []
    for canary in (True, False):
        prepared = prepare(make(mlp(lambda: nn.Dropout(0.3))), settings(canary=canary))
        assert (prepared.canary is not None) == canary
        assert prepared.canary_trouble == ""
        states.append((prepared.learner.weights_sha256(), torch.get_rng_state().tolist()))
    assert states[0] == states[1]


# --- others ---------------------------------------------------------------------------------------


def network(
    layer: Callable[[int, int], nn.Module] = nn.Linear, between: Callable[[], nn.Module] = nn.ReLU
) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 32), between(), layer(32, 32), between(), nn.Linear(32, CLASSES)
        )

    return model


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (network(Backward), ["the gradient of 2.weight differs by", "0 of the other 5"]),
        (network(Deaf), ["the gradient of 2.weight differs by", "0 of the other 5"]),
        (network(between=nn.LeakyReLU), ["differs by", "of the other 5 differ too"]),
        (network(between=nn.Tanh), ["differs by"]),
        (network(Rough), ["differs by", "(0.001 may be rounding)"]),
    ],
)
def test_another_model_of_the_same_layout_is_named_by_the_layer_that_differs(model: Any, named: list[str]):
    prepared = prepare(make(network()), settings())
    wrong = wrong_with(parts_of(make(model), prepared), prepared)
    assert all(words in wrong for words in named), wrong


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: -loss,
        lambda loss: 0 * loss,
        lambda loss: 1000 * loss,
        lambda loss: 1.01 * loss,
        lambda loss: loss * math.nan,
        lambda loss: loss * math.inf,
    ],
)
def test_another_loss_is_found_out(change: Any):
    prepared = prepare(make(network()), settings())
    other = make(network(), loss=lambda model, batch: change(jobs.classify(model, batch)))
    assert "differs by" in wrong_with(parts_of(other, prepared), prepared)


@pytest.mark.parametrize(
    ("model", "more"),
    [
        (network(), {}),
        (jobs.convolutions, {"data": jobs.images}),
        (jobs.Attention, {"data": jobs.tokens, "loss": jobs.foretell}),
        (mlp(lambda: nn.BatchNorm1d(16)), {}),
    ],
)
def test_a_wrong_precision_is_found_out_on_ordinary_models(model: Any, more: dict[str, Any]):
    job = make(model, **more)
    prepared = prepare(job, settings())
    parts = parts_of(job, prepared)
    computes_with(parts, lambda trainer: setattr(trainer, "_autocasts", True))
    assert "differs by" in wrong_with(parts, prepared)


def test_with_other_random_numbers_only_sizes_are_compared(monkeypatch: pytest.MonkeyPatch):
    """As on another kind of device, which draws others under the same seed."""
    job = make(mlp(lambda: nn.Dropout(0.4)))
    prepared = prepare(job, settings())

    def wrong(change: Any) -> str:
        other = make(mlp(lambda: nn.Dropout(0.4)), loss=lambda m, batch: change(jobs.classify(m, batch)))
        parts = parts_of(other, prepared)
        monkeypatch.setattr(parts.trainer, "_seed", lambda key: torch.manual_seed(99))
        with monkeypatch.context() as patched:
            patched.setattr("w5xde.learn.trust.canary.torch_seeder", lambda device: lambda seed: None)
            return wrong_with(parts, prepared)

    assert wrong(lambda loss: loss) == ""
    assert wrong(lambda loss: 3 * loss) == ""
    assert "times as large" in wrong(lambda loss: 100 * loss)
    assert "times as large" in wrong(lambda loss: 0 * loss)
    assert "times as large" in wrong(lambda loss: loss * math.nan)


def test_a_node_that_cannot_compute_it_says_so():
    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    prepared = prepare(make(network()), settings())
    with pytest.raises(JoinError, match="illegal memory access") as caught:
        wrong_with(parts_of(make(network(), loss=fails), prepared), prepared)
    assert caught.value.code == "W5-212"


# --- jobs without a canary --------------------------------------------------------------------------


class Choosy(nn.Module):
    """Works with the weights that it was built with, and with no others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, CLASSES)
        nn.init.constant_(self.inner.bias, 1.0)

    def forward(self, numbers: Tensor) -> Tensor:
        if not bool((self.inner.bias == 1.0).all()):
            raise ValueError("a bias of one is what I was built with")
        return self.inner(numbers)


def test_a_job_that_fails_on_other_weights_has_no_canary_and_says_why():
    prepared = prepare(make(Choosy), settings())
    assert prepared.canary is None
    assert "a bias of one is what I was built with" in prepared.canary_trouble


def test_the_canary_is_a_few_samples_however_large_a_batch_is():
    prepared = prepare(make(network()), settings(batch_size=50))
    assert isinstance(prepared.canary, ExpectedCanary)
    assert len(prepared.canary.body) == SAMPLES * (FEATURES * 4 + 8)
    assert prepared.canary.answer_bytes == (1 + 6) * ROW * 8
    assert prepared.canary.seconds > 0
    assert ROUNDING == 1e-3


# --- a coordinator that sends nonsense ----------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda fills: fills[:-1],
        lambda fills: [*fills, None],
        lambda fills: [],
        lambda fills: [fills[0]] * len(fills),
    ],
)
def test_a_canary_that_does_not_fit_the_layout_is_refused(spoil: Any):
    job = make(mlp(lambda: nn.BatchNorm1d(16)))
    prepared = prepare(job, settings())
    parts, welcome = parts_of(job, prepared), welcome_of(prepared)
    assert prepared.canary is not None
    assert welcome.canary is not None
    bad = msgspec.structs.replace(welcome.canary, fills=spoil(welcome.canary.fills))
    with pytest.raises(RemoteProtocolError):
        parts.prove(msgspec.structs.replace(welcome, canary=bad), bytearray(prepared.canary.body))


@pytest.mark.parametrize("length", [0, 10, 200])
def test_a_canary_without_all_of_its_bytes_is_refused(length: int):
    job = make(mlp(lambda: nn.BatchNorm1d(16)))
    prepared = prepare(job, settings())
    parts = parts_of(job, prepared)
    assert prepared.canary is not None
    with pytest.raises(RemoteProtocolError):
        parts.prove(welcome_of(prepared), bytearray(prepared.canary.body[:length]))


@pytest.mark.parametrize("fill", [Fill(math.nan, 1.0, 0.0, 1.0), Fill(0.0, math.inf, -math.inf, math.inf)])
def test_numbers_that_are_none_spoil_nothing_but_the_canary(fill: Fill):
    job = make(network())
    prepared = prepare(job, settings())
    parts, welcome = parts_of(job, prepared), welcome_of(prepared)
    assert prepared.canary is not None
    assert welcome.canary is not None
    bad = msgspec.structs.replace(welcome.canary, fills=[fill] * len(welcome.canary.fills))
    parts.prove(msgspec.structs.replace(welcome, canary=bad), bytearray(prepared.canary.body))
    assert wrong_with(parts, prepared) == ""


class Remembers(nn.Module):
    """Keeps what its frozen half gave the first time, as encoders of fixed prompts do."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(8, CLASSES).requires_grad_(False), nn.Linear(FEATURES, 8)
        self.kept: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.frozen(torch.eye(8)).detach()
        return self.head(inputs) @ self.kept


def test_what_a_model_keeps_of_its_first_batch_is_not_the_canarys():
    job = make(Remembers)
    prepared = prepare(job, settings())
    parts = parts_of(job, prepared)
    assert wrong_with(parts, prepared) == ""
    assert parts.trainer.module.kept is None


def test_a_buffer_that_is_another_each_time_makes_no_node_wrong():
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            chance = np.random.default_rng()
            self.register_buffer("proj", torch.from_numpy(chance.standard_normal((FEATURES, 1000))).float())
            self.last = nn.Linear(1000, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(inputs @ self.proj)

    prepared = prepare(make(Projected), settings())
    assert prepared.canary is None
    assert "buffer proj" in prepared.canary_trouble


def test_samples_that_are_mostly_words_are_no_canary():
    class Words(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> tuple[str, Tensor, Tensor]:
            return "x" * 500_000, torch.zeros(FEATURES), torch.tensor(i % CLASSES)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[1]), batch[2])

    prepared = prepare(make(mlp(), data=Words, loss=loss), settings())
    assert prepared.canary is None
    assert "bytes beside their tensors" in prepared.canary_trouble
