"""The learner of a pool: it hands gradients over, and knows what its caller has changed in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.learn.calls.pools import BATCH, model, prepared
from w5xde.errors import JobError
from w5xde.learn.calls.call_learner import CallLearner
from w5xde.learn.step.sums import Contribution, StepNotFinite, Total
from w5xde.runtime.coordinator.call_ports import CallParameters
from w5xde.runtime.pipeline.peer import Peer, SentParams


class Counting(nn.Module):
    """Has every kind of tensor: trained, frozen, a small buffer that is replaced, and a large constant."""

    steps: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(4, 2)
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("table", torch.ones(5000, dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        return self.trained(rows) + self.frozen(rows)


def learner_of(build: Callable[[], nn.Module] = Counting) -> CallLearner:
    losses = {"loss": lambda net, rows: net(rows).square().mean()}
    return prepared(build, losses, BATCH).learner


def total(learner: CallLearner, value: float = 1.0, **changes: Any) -> Total:
    vector = learner.flat.blueprint.new_vector()
    for part in vector.parts:
        part.fill_(0)
    vector.parts[0].fill_(value)
    return Total(2, Contribution(vector, changes.get("absent", frozenset()), 4.0))


def answer(learner: CallLearner, **changes: Any) -> None:
    """One call, from its beginning to its end."""
    learner.begin_call()
    with torch.no_grad():
        learner.apply([total(learner, **changes)])
    learner.end_call()


def sent(learner: CallLearner, known: int) -> str:
    """What a node is sent that has had the parameters of a version."""
    peer = Peer(cast(Any, None), cast(Any, None), name="a")
    peer.params = SentParams(known)
    frames = CallParameters(learner, "none", lambda: 0.0).get(peer, whole=known < 0, ahead=0.0).frames
    return "".join("whole" if frame.message.whole else "moving" for frame in frames) or "nothing"  # type: ignore[union-attr]


def test_gradients_are_set_and_then_added_and_absent_ones_are_left_alone() -> None:
    learner = learner_of()
    module = cast(Counting, learner.flat.module)
    entries = learner.flat.blueprint.layout.entries
    bias = next(i for i, entry in enumerate(entries) if entry.name == "trained.bias")
    answer(learner, absent=frozenset([bias]))
    assert module.trained.weight.grad is not None
    assert module.trained.weight.grad.eq(1).all()
    assert module.trained.bias.grad is module.frozen.weight.grad is None
    answer(learner, value=2.0)
    assert module.trained.weight.grad.eq(3).all()
    assert module.trained.bias.grad is not None
    assert module.trained.bias.grad.eq(2).all()
    assert learner.version == 2


def test_memory_of_the_sum_is_not_kept_by_the_gradients() -> None:
    learner = learner_of()
    learner.begin_call()
    given = total(learner)
    learner.apply([given])
    learner.end_call()
    given.contribution.vector.raw.zero_()
    assert cast(Counting, learner.flat.module).trained.weight.grad.eq(1).all()  # type: ignore[union-attr]


def test_buffers_that_would_not_be_finite_are_refused_and_nothing_is_handed_over() -> None:
    learner = learner_of()
    learner.begin_call()
    broken = total(learner)
    broken.contribution.vector.parts[1].fill_(torch.inf)
    with torch.no_grad(), pytest.raises(StepNotFinite):
        learner.apply([broken])
    assert (learner.version, learner.is_whole) == (0, True)
    learner.end_call()
    assert all(each.grad is None for each in learner.flat.module.parameters())


# --- parameters are sent only if they changed ---------------------------------------------------------


def nothing(net: Counting) -> None: ...


def optimizer_step(net: Counting) -> None:
    with torch.no_grad():
        net.trained.weight.add_(1)


def write_through_data(net: Counting) -> None:
    net.trained.weight.data.add_(1)


def assign_data(net: Counting) -> None:
    net.trained.bias.data = net.trained.bias.data + 1


def load(net: Counting) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def replace_buffer(net: Counting) -> None:
    net.steps = net.steps + 1


def move_target(net: Counting) -> None:
    net.frozen.weight.data.mul_(0.5)


def step_target(net: Counting) -> None:
    with torch.no_grad():
        net.frozen.bias.add_(1)


def change_table(net: Counting) -> None:
    net.table[7] = 3


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (nothing, "nothing"),
        (optimizer_step, "moving"),
        (write_through_data, "moving"),
        (assign_data, "moving"),
        (load, "whole"),
        (replace_buffer, "moving"),
        (move_target, "whole"),
        (step_target, "whole"),
        (change_table, "whole"),
    ],
)
def test_a_node_is_sent_what_its_caller_changed_and_no_more(
    change: Callable[[Counting], None], what: str
) -> None:
    learner = learner_of()
    module = cast(Counting, learner.flat.module)
    # In the first call after one that changed nothing the watch begins to compare by hash.
    for _ in range(2):
        answer(learner)
    before = learner.version
    change(module)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    learner.begin_call()
    assert sent(learner, known=before - 1) == what
    # All of it lies in the state that is sent, wherever it was written.
    flat = learner.flat
    places = [flat.state.data_ptr() + offset for offset in flat.blueprint.offsets]
    assert [tensor.data_ptr() for tensor in flat.tensors] == places
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    assert sent(learner, known=before) == "nothing"  # it was sent in this very call
    with torch.no_grad():
        learner.apply([total(learner)])
    learner.end_call()
    answer(learner)
    assert sent(learner, known=before) == "nothing"


def test_a_node_that_comes_late_is_sent_everything() -> None:
    learner = learner_of()
    for _ in range(3):
        answer(learner)
    learner.begin_call()
    assert sent(learner, known=-1) == "whole"


def test_buffers_that_a_call_moved_are_sent_with_the_next() -> None:
    learner = learner_of(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    learner.begin_call()
    given = total(learner)
    given.contribution.vector.parts[1].fill_(0.5)
    with torch.no_grad():
        learner.apply([given])
    learner.end_call()
    learner.begin_call()
    assert sent(learner, known=0) == "moving"


def test_what_was_encoded_for_a_call_that_was_given_up_is_not_sent_again() -> None:
    learner = learner_of()
    parameters = CallParameters(learner, "shuffle|zlib:1", lambda: 0.0)
    peer = Peer(cast(Any, None), cast(Any, None), name="a")

    def bits() -> bytes:
        return b"".join(parameters.get(peer, whole=True, ahead=0.0).frames[0].pieces)

    learner.begin_call()
    before, kept = bits(), bytes(parameters.kept_copy(0.0).state)
    # The call ends without a step.
    learner.skip()
    optimizer_step(cast(Counting, learner.flat.module))
    learner.begin_call()
    assert bits() != before
    assert bytes(parameters.kept_copy(0.0).state) != kept


# --- what nodes cannot follow ------------------------------------------------------------------------


def replace_parameter(net: Counting) -> None:
    net.trained.weight = nn.Parameter(torch.zeros(2, 4))


def add_a_layer(net: Counting) -> None:
    net.add_module("more", nn.Linear(2, 2))


def halve(net: Counting) -> None:
    net.half()


def remove_buffer(net: Counting) -> None:
    net.steps = None  # type: ignore[assignment]


def grow_buffer(net: Counting) -> None:
    net.steps = torch.zeros(4)


@pytest.mark.parametrize("change", [replace_parameter, add_a_layer, halve, remove_buffer, grow_buffer])
def test_a_model_that_is_another_now_is_refused(change: Callable[[Counting], None]) -> None:
    learner = learner_of()
    change(cast(Counting, learner.flat.module))
    with pytest.raises(JobError) as refused:
        learner.begin_call()
    assert refused.value.code == "W5-273"


def test_a_frozen_parameter_that_is_trained_later_is_refused() -> None:
    losses = {"loss": lambda net, rows: net(rows).square().mean()}
    setup = prepared(Counting, losses, BATCH)
    cast(Counting, setup.learner.flat.module).frozen.requires_grad_(True)
    with pytest.raises(JobError) as refused:
        setup.call("loss", cast(Any, None))
    assert refused.value.code == "W5-274"
    assert "frozen.weight requires a gradient now" in refused.value.what


def test_flags_of_the_moment_make_the_call() -> None:
    setup = prepared()
    assert setup.call("d", cast(Any, None)).frozen == b""
    net = cast(Any, setup.learner.flat.module)
    net["d"].requires_grad_(False)
    net["g"].eval()
    found = setup.call("d", cast(Any, None))
    assert found.frozen == b"\x3c"  # after the weight and bias of g
    assert found.evaluating != b""
    assert model().training
