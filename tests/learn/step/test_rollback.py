"""A step that was rolled back leaves no trace in any later step, on flat memory as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from w5xde.learn.model.layout import FlatModel, describe
from w5xde.learn.step import flat_steps
from w5xde.learn.step.checkpoint import capture, restore
from w5xde.learn.step.fast_optimizer import ELEMENT_WISE
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, StepNotFinite, Total

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda params: SGD(params, lr=0.01, momentum=0.9),
    "fused adam": lambda params: Adam(params, lr=0.01, fused=True),
} | {
    kind.__name__: lambda params, kind=kind: kind(params, lr=0.01)  # type: ignore[misc]
    for kind in ELEMENT_WISE
}
ALL: frozenset[int] = frozenset()
FIRST, LAST = frozenset([0]), frozenset([2])
# The entries without a gradient: in the steps before the bad one, in the bad one, and in those after it.
HISTORIES = {
    "always the same": ([ALL] * 3, ALL, [ALL] * 4),
    "the first step is bad": ([], ALL, [ALL] * 4),
    "the last parameter never has a gradient": ([], LAST, [LAST] * 4),
    "a state that was gathered by the bad step": ([FIRST, ALL], ALL, [ALL] * 4),
    "only the bad step lacks a gradient": ([ALL] * 2, FIRST, [ALL] * 4),
    "the step before lacks one": ([ALL] * 3 + [FIRST], ALL, [ALL] * 4),
}


class Parts(nn.Module):
    """Three parameters that lie one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.middle, self.last = (
            nn.Parameter(torch.randn(count, generator=generator)) for count in (11, 6, 9)
        )


def learner_of(make: Callable[[Any], Optimizer]) -> Learner:
    module = Parts()
    return Learner(FlatModel(module, describe(module, set())), make(module.parameters()))


def total(learner: Learner, seed: int, absent: frozenset[int]) -> Total:
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    vector.parts[0].copy_(torch.randn(vector.parts[0].shape, generator=torch.Generator().manual_seed(seed)))
    return Total(1, Contribution(vector, absent, 1.0, learner.gauge.norm(vector)))


def bad(learner: Learner, absent: frozenset[int]) -> Total:
    vector = learner.flat.blueprint.new_vector()
    vector.parts[0].fill_(math.nan)
    return Total(1, Contribution(vector, absent, 1.0, math.inf))


def are_level(ours: Learner, theirs: Learner) -> bool:
    return torch.equal(ours.flat.moving.parts[0], theirs.flat.moving.parts[0]) and str(
        ours.optimizer.state_dict()
    ) == str(theirs.optimizer.state_dict())


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_after_one_that_was_rolled_back_are_as_if_it_had_not_been_tried(
    name: str,
    history: tuple[list[frozenset[int]], frozenset[int], list[frozenset[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Pieces that end inside parameters.
    monkeypatch.setattr(flat_steps, "PIECE_NUMBERS", 8)
    before, absent, after = history
    learner, other = learner_of(OPTIMIZERS[name]), learner_of(OPTIMIZERS[name])
    with torch.no_grad():
        for step, lacking in enumerate(before):
            for each in (learner, other):
                each.apply([total(each, step, lacking)])
        with pytest.raises(StepNotFinite):
            learner.apply([bad(learner, absent)])
        assert learner.is_whole
        assert are_level(learner, other)
        for step, lacking in enumerate(after, len(before)):
            for each in (learner, other):
                each.apply([total(each, step, lacking)])
            assert are_level(learner, other), step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_after_a_rollback_has_the_whole_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_steps, "PIECE_NUMBERS", 8)
    learner, other = learner_of(OPTIMIZERS[name]), learner_of(OPTIMIZERS[name])
    with torch.no_grad():
        for step in range(3):
            learner.apply([total(learner, step, LAST)])
        with pytest.raises(StepNotFinite):
            learner.apply([bad(learner, LAST)])
        learner.apply([total(learner, 3, LAST)])
        restore(other, {file: b"".join(pieces) for file, pieces in capture(learner).files().items()})
        for step in range(4, 7):
            for each in (learner, other):
                each.apply([total(each, step, LAST)])
            assert are_level(learner, other), step
