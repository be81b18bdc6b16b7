"""What cannot be right is refused before any node is used, with a sentence that says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

from tests.learn import jobs
from tests.learn.jobs import CLASSES, FEATURES, classify, make, mlp, settings
from w5xde import Job
from w5xde.errors import JobError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.specs.planned_run import PlannedRun


def refusal(job: Job, **changes: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        prepare(job, settings(**changes))
    # Errors are whole sentences for a person, with advice.
    assert caught.value.fix
    return caught.value


# --- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "what", "fix"),
    [
        (lambda m, b: m(b[0]).flatten(), "shape (12,)", "loss.mean()"),
        (lambda m, b: classify(m, b).item(), "a float, not a tensor", "without .item()"),
        (lambda m, b: classify(m, b) / 0, "inf on the first batch", "log of zero"),
        (lambda m, b: m(b[0]).sum() * torch.nan, "nan on the first batch", "NaN in the data"),
        (lambda m, b: m(b[0]).detach().sum(), "does not depend on any parameter", ".detach()"),
        (lambda m, b: m(b[0]).sum() * 1j, "complex", "real"),
    ],
)
def test_a_loss_that_is_not_one_finite_number_to_be_made_smaller(loss: Any, what: str, fix: str) -> None:
    error = refusal(make(mlp(), loss=loss))
    assert error.code == "W5-205"
    assert what in error.what
    assert fix in error.fix


def test_a_loss_of_another_model_trains_nothing() -> None:
    other = nn.Linear(jobs.FEATURES, jobs.CLASSES)
    error = refusal(make(mlp(), loss=lambda m, b: classify(other, b)))
    assert error.code == "W5-205"
    assert "does not depend on any parameter of the model" in error.what
    assert "the model that it is given" in error.fix


@pytest.mark.parametrize(
    "model",
    [
        mlp(),
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, jobs.FEATURES)), nn.Conv1d(1, 3, jobs.FEATURES), nn.Flatten()
        ),
        lambda: nn.Sequential(nn.LayerNorm(jobs.FEATURES), nn.Linear(jobs.FEATURES, jobs.CLASSES)),
    ],
)
def test_inputs_of_float64_are_named_with_the_way_out(model: Any) -> None:
    wide = [(row.double().numpy(), label) for row, label in jobs.points()]
    error = refusal(make(model, data=lambda: wide))
    assert error.code == "W5-205"
    assert "batch[0] is float64" in error.fix
    assert "astype(np.float32)" in error.fix


def test_a_shape_that_does_not_fit_is_not_blamed_on_types() -> None:
    wide = [(row.double().numpy()[:3], label) for row, label in jobs.points()]
    assert "shape" in refusal(make(lambda: mlp()().double(), data=lambda: wide)).fix


def test_labels_of_the_wrong_type_are_told_with_the_users_own_line() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nll_loss(model(batch[0]), batch[1].float())

    error = refusal(make(mlp(), loss=loss))
    assert error.code == "W5-205"
    assert "before any node was used" in error.what
    assert f"{Path(__file__).name}, line {loss.__code__.co_firstlineno + 1}" in error.why
    assert "y.long()" in error.fix


def test_inputs_of_the_wrong_shape_are_told_as_such() -> None:
    error = refusal(make(mlp(), loss=lambda model, batch: model(batch[0][:, 1:]).sum()))
    assert error.code == "W5-205"
    assert "shape" in error.fix


def test_a_loss_that_fails_only_backwards_is_told_too() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch[0]).exp()
        kept = found.square().sum()
        with torch.no_grad():
            found.zero_()
        return kept

    assert refusal(make(mlp(), loss=loss)).code == "W5-205"


class Teacher(nn.Module):
    """A student, and a teacher that the loss moves after it, in one of the ways people write that."""

    def __init__(self, follow: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.student = nn.Linear(FEATURES, CLASSES)
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self._follow = follow

    def forward(self, numbers: Tensor) -> Tensor:
        with torch.no_grad():
            self._follow(self.teacher.weight, self.student.weight)
        return self.student(numbers) - self.teacher(numbers)


def _repoint(teacher: Tensor, student: Tensor) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


FOLLOWING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in place": lambda teacher, student: teacher.lerp_(student, 0.1),
    "in place through data": lambda teacher, student: teacher.data.mul_(0.9).add_(student.data, alpha=0.1),
    "with other data": _repoint,
}


@pytest.mark.parametrize("follow", FOLLOWING.values(), ids=list(FOLLOWING))
def test_a_loss_that_changes_parameters_itself(follow: Callable[[Tensor, Tensor], Any]) -> None:
    error = refusal(make(lambda: Teacher(follow)))
    assert error.code == "W5-224"
    assert "teacher.weight" in error.what


def test_a_parameter_that_is_made_while_training() -> None:
    error = refusal(make(lambda: jobs.Unborn("second")))
    assert error.code == "W5-221"
    assert "parameter second is created only when" in error.what
    assert refusal(make(lambda: jobs.Unborn("first"))).code == "W5-224"


@pytest.mark.parametrize("kind", ["remembers", "draws from its own generator"])
def test_a_model_whose_answer_depends_on_what_it_was_asked_before(kind: str) -> None:
    error = refusal(make(lambda: jobs.Wilful(kind)))
    assert error.code == "W5-231"
    assert "for the same batch" in error.what
    assert "register_buffer" in error.fix
    # In async mode the order of the answers is chance anyway.
    prepare(make(lambda: jobs.Wilful(kind)), settings(mode="async"))


def _count(net: Stateful, hidden: Tensor) -> Tensor:
    net.calls += 1
    return hidden * min(1.0, net.calls / 1e9)


def _count_in_a_dict(net: Stateful, hidden: Tensor) -> Tensor:
    net.kept["calls"] = net.kept.get("calls", 0) + 1
    # It shows only after a while.
    return hidden * (2.0 if net.kept["calls"] > 1000 else 1.0)


def _cool(net: Stateful, hidden: Tensor) -> Tensor:
    net.temperature *= 0.999999
    return hidden / net.temperature


def _cool_by_numpy(net: Stateful, hidden: Tensor) -> Tensor:
    net.kept["temperature"] = np.float32(0.99) * net.kept.get("temperature", np.float32(1))
    return hidden / (1 + 1e-9 * float(net.kept["temperature"]))


def _follow(net: Stateful, hidden: Tensor) -> Tensor:
    net.running = 0.999999 * net.running + 1e-6 * hidden.detach().mean()
    return hidden - 1e-6 * net.running


def _queue(net: Stateful, hidden: Tensor) -> Tensor:
    net.queue = torch.cat([net.queue[1:], net.queue[:1]])
    return hidden + 0 * net.queue[0]


def _count_in_an_object(net: Stateful, hidden: Tensor) -> Tensor:
    net.helper.calls += 1
    return hidden * (2.0 if net.helper.calls > 1000 else 1.0)


class Helper:
    def __init__(self) -> None:
        self.calls = 0


class Stateful(nn.Module):
    """Keeps numbers and tensors in plain attributes, and does with them what a test wants."""

    def __init__(self, act: Callable[[Stateful, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(jobs.FEATURES, jobs.CLASSES)
        self._act = act
        self.calls = 0
        self.kept: dict[str, Any] = {}
        self.temperature = 1.0
        self.running = torch.zeros(())
        self.queue = torch.arange(4.0)
        self.history: list[float] = []
        self.helper = Helper()

    def forward(self, numbers: Tensor) -> Tensor:
        return self._act(self, self.inner(numbers))


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (_count, "calls"),
        (_count_in_a_dict, "kept['calls']"),
        (_count_in_an_object, "helper.calls"),
        (_cool, "temperature"),
        (_cool_by_numpy, "kept['temperature']"),
        (_follow, "running"),
        (_queue, "queue"),
    ],
)
def test_state_in_a_python_attribute_is_refused_by_name(act: Any, name: str) -> None:
    error = refusal(make(lambda: nn.Sequential(Stateful(act))))
    assert error.code == "W5-243"
    assert f"every batch changes the model's 0.{name}, which no buffer holds" in error.what
    assert "register_buffer" in error.fix
    assert "w5xde.current()" in error.fix
    # In async mode the order of the answers is chance anyway.
    prepare(make(lambda: Stateful(act)), settings(mode="async"))
    assert refusal(make(lambda: Stateful(act)), mode="async", verify=0.1).code == "W5-243"


_losses_computed = 0
_kept_outside = {"losses": 0}


def _loss_that_counts(model: nn.Module, batch: Any) -> Tensor:
    global _losses_computed  # noqa: PLW0603
    _losses_computed += 1
    return classify(model, batch) * (2.0 if _losses_computed > 1000 else 1.0)


def _loss_that_counts_in_a_dict(model: nn.Module, batch: Any) -> Tensor:
    _kept_outside["losses"] += 1
    return classify(model, batch) * (2.0 if _kept_outside["losses"] > 1000 else 1.0)


class _CountingLoss(Helper):
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return classify(model, batch) * (2.0 if self.calls > 1000 else 1.0)


def _loss_with_a_closure() -> Callable[[nn.Module, Any], Tensor]:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return classify(model, batch) * (2.0 if calls > 1000 else 1.0)

    return loss


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (_loss_that_counts, "_losses_computed"),
        (_loss_that_counts_in_a_dict, "_kept_outside['losses']"),
        (_CountingLoss(), "the loss's calls"),
        (_CountingLoss().__call__, "the loss's calls"),
        (_loss_with_a_closure(), "calls"),
    ],
)
def test_state_of_a_loss_is_refused_by_name(loss: Any, name: str) -> None:
    error = refusal(make(mlp(), loss=loss))
    assert error.code == "W5-243"
    assert f"every batch changes {name}, which no buffer holds" in error.what
    prepare(make(mlp(), loss=loss), settings(mode="async"))


def _cache(net: Stateful, hidden: Tensor) -> Tensor:
    if "mask" not in net.kept:
        net.kept["mask"] = torch.ones_like(hidden)
        net.calls += 1
    return hidden * net.kept["mask"]


def _grow_once(net: Stateful, hidden: Tensor) -> Tensor:
    net.calls = min(net.calls + 1, 2)
    return hidden


def _keep_the_last(net: Stateful, hidden: Tensor) -> Tensor:
    net.running, net.temperature = hidden.detach().mean(), float(hidden.detach().sum())
    net.kept["output"] = hidden
    return hidden


def _write_down(net: Stateful, hidden: Tensor) -> Tensor:
    net.history.append(float(hidden.detach().sum()))
    return hidden


@pytest.mark.parametrize("act", [_cache, _grow_once, _keep_the_last, _write_down])
def test_caches_results_and_notes_are_no_state(act: Any) -> None:
    prepare(make(lambda: Stateful(act)), settings())


def test_a_count_that_is_a_buffer_is_trained() -> None:
    class Counting(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(jobs.FEATURES, jobs.CLASSES)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, numbers: Tensor) -> Tensor:
            self.calls += 1
            found: Tensor = self.inner(numbers)
            return found

    prepare(make(Counting), settings())


def test_a_loss_may_do_with_its_batch_what_it_likes() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, (batch[0].mul_(3), batch.pop()))

    prepare(make(mlp(), loss=loss), settings())


# --- the model ----------------------------------------------------------------------------------


def test_sparse_gradients() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, 11, sparse=True))

    error = refusal(make(model, data=jobs.tokens, loss=jobs.foretell))
    assert error.code == "W5-225"
    assert "0.weight" in error.what
    assert "sparse=False" in error.fix


def test_a_lazy_module() -> None:
    error = refusal(make(lambda: nn.Sequential(nn.LazyLinear(CLASSES))))
    assert error.code == "W5-221"
    assert "0.weight has no shape yet" in error.what


def test_two_parameters_in_the_same_memory() -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES))
        made[1].weight = nn.Parameter(made[0].weight.detach().T)
        return made

    error = refusal(make(model))
    assert error.code == "W5-223"
    assert "0.weight and 1.weight share memory" in error.what


def test_a_model_without_anything_to_train() -> None:
    for model in (nn.Identity, lambda: mlp()().requires_grad_(False)):
        error = refusal(make(model))
        assert error.code == "W5-222"
        assert "no parameter to train" in error.what


def test_something_that_is_not_a_module() -> None:
    error = refusal(make(lambda: "a network"))  # type: ignore[arg-type,return-value]
    assert (error.code, error.what) == ("W5-202", "model() returned a str")


def test_a_dtype_that_the_saved_model_could_not_hold() -> None:
    def model() -> nn.Module:
        made = mlp()()
        made.register_buffer("spectrum", torch.ones(2, dtype=torch.complex128))
        return made

    error = refusal(make(model))
    assert error.code == "W5-230"
    assert "spectrum is complex128" in error.what


# --- buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "what", "fix"),
    [
        (
            lambda: jobs.Buffered(torch.zeros(1), jobs.grow),
            "changes its shape",
            "persistent=False if it is a cache",
        ),
        (
            lambda: jobs.Buffered(torch.zeros(1), jobs.count, persistent=False),
            "is not persistent",
            "persistent=True",
        ),
        (lambda: jobs.Buffered(torch.tensor(-torch.inf), jobs.highest), "starts at -inf", "finite number"),
        (lambda: jobs.Buffered(torch.eye(3).to_sparse(), jobs.nothing), "is sparse", ".to_dense()"),
    ],
)
def test_a_buffer_that_nobody_could_average(model: Any, what: str, fix: str) -> None:
    error = refusal(make(model))
    assert error.code == "W5-226"
    assert "memory" in error.what
    assert what in error.what
    assert fix in error.fix


def test_caches_that_are_not_persistent_may_share_memory_grow_and_be_sparse() -> None:
    def model() -> nn.Module:
        made = jobs.Buffered(torch.zeros(1), jobs.grow, persistent=False)
        waves = torch.polar(torch.ones(4), torch.arange(4.0))
        made.register_buffer("cosine", waves.real, persistent=False)
        made.register_buffer("sine", waves.imag, persistent=False)
        made.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        return made

    prepare(make(model), settings())


# --- optimizer, schedule, evaluation, data ------------------------------------------------------


def test_an_optimizer_that_wants_the_loss_again() -> None:
    error = refusal(make(mlp(), optimizer=LBFGS))
    assert error.code == "W5-227"
    assert "LBFGS" in error.what
    assert "AdamW" in error.fix


def test_an_optimizer_of_other_parameters() -> None:
    stranger = nn.Linear(2, 2)
    error = refusal(make(mlp(), optimizer=lambda params: SGD(stranger.parameters(), lr=0.1)))
    assert error.code == "W5-227"
    assert "not the model's" in error.what


def test_an_optimizer_that_cannot_be_made() -> None:
    def optimizer(params: Any) -> Any:
        return SGD(params, lr=-1)

    with pytest.raises(JobError) as caught:
        prepare(make(mlp(), optimizer=optimizer), settings())
    assert caught.value.code == "W5-202"
    assert "Invalid learning rate" in caught.value.what
    assert f"line {optimizer.__code__.co_firstlineno + 1}" in caught.value.what


def test_a_schedule_that_wants_a_metric() -> None:
    error = refusal(make(mlp(), scheduler=ReduceLROnPlateau))
    assert error.code == "W5-228"
    assert "evaluate=" in error.fix


@pytest.mark.parametrize(
    "evaluate", [lambda model: model("text"), lambda model: None, lambda model: {"a": "b"}]
)
def test_an_evaluation_that_would_fail_after_an_hour_fails_at_once(evaluate: Any) -> None:
    error = refusal(make(mlp(), evaluate=evaluate))
    assert error.code == "W5-229"
    assert "untrained model" in error.what


def test_an_evaluation_may_return_one_number_and_leaves_training_mode_alone() -> None:
    prepared = prepare(make(mlp(), evaluate=lambda model: torch.tensor(0.5)), settings())
    assert prepared.evaluate is not None
    assert prepared.evaluate(mlp()()) == {"score": 0.5}
    assert prepared.learner.flat.module.training


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("data", [list, Nothing, lambda: TensorDataset(torch.empty(0, 2))])
def test_data_without_a_sample(data: Any) -> None:
    error = refusal(make(mlp(), data=data))
    assert (error.code, error.what) == ("W5-204", "the data set is empty")
    assert "at least one sample" in error.fix


# --- what the trial leaves behind ---------------------------------------------------------------


def _remember(model: Any, numbers: Tensor) -> None:
    """What distillation does: a buffer that is for a moment the weights themselves."""
    model.memory = model.inner.weight.detach()


@pytest.mark.parametrize(
    "model",
    [
        mlp(lambda: nn.BatchNorm1d(16), lambda: nn.Dropout(0.5)),
        jobs.Memories,
        lambda: jobs.Buffered(torch.zeros(CLASSES, FEATURES), _remember),
        lambda: jobs.Buffered(torch.zeros(1), jobs.count),
    ],
    ids=["batch norm", "memories", "alias", "counter"],
)
def test_trying_the_first_batch_leaves_the_model_as_it_was(model: Callable[[], nn.Module]) -> None:
    built: list[tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]] = []

    def watched() -> nn.Module:
        made = model()
        built.append((made, copy.deepcopy(made.state_dict()), dict(made.named_buffers())))
        return made

    prepare(make(watched), settings())
    made, state, buffers = built[0]
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in made.named_buffers())
    assert all(parameter.grad is None for parameter in made.parameters())


@pytest.mark.parametrize("early", [False, True])
def test_a_model_that_keeps_what_it_computed_can_be_tried_and_evaluated(early: bool) -> None:
    prepared = prepare(make(lambda: jobs.Hoarder(early=early), evaluate=lambda model: 1.0), settings())
    kept = prepared.learner.flat.module.kept
    assert (kept is not None) == early


def test_a_model_that_comes_in_evaluation_mode_is_trained_all_the_same() -> None:
    prepared = prepare(make(lambda: mlp(lambda: nn.Dropout(0.5))().eval()), settings())
    assert all(module.training for module in prepared.learner.flat.module.modules())


# --- the length of the run ------------------------------------------------------------------------


def test_an_optimizer_finds_the_model_and_the_length_of_the_run() -> None:
    seen: list[Any] = []

    def optimizer(params: Any) -> Any:
        seen.append(params)
        return SGD(params, lr=0.1)

    prepared = prepare(make(mlp(), optimizer=optimizer), settings(epochs=4, batch_size=8, batches_per_step=3))
    batches = -(-jobs.SAMPLES // 8)
    assert seen[-1].module is prepared.learner.flat.module
    assert seen[-1].run == PlannedRun(
        steps=4 * -(-batches // 3),
        epoch_steps=-(-batches // 3),
        epoch_batches=batches,
        step_batches=3,
        epochs=4,
    )


def test_a_limit_of_steps_limits_the_epochs_that_are_planned() -> None:
    planned = PlannedRun.of(samples=40, batch_size=4, step_batches=2, epoch_limit=None, step_limit=7)
    assert (planned.steps, planned.epoch_steps, planned.epochs) == (7, 5, 2)
    endless = PlannedRun.of(samples=None, batch_size=4, step_batches=2, epoch_limit=None, step_limit=None)
    assert (endless.steps, endless.epoch_steps, endless.epochs) == (None, None, None)


def test_a_schedule_that_is_none_is_no_schedule() -> None:
    prepared = prepare(make(mlp(), scheduler=lambda optimizer: None), settings())
    assert prepared.learner.scheduler is None
