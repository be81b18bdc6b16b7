"""What nodes say of their losses: numbers, or it counts for nothing."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from w5xde.control import events as ev
from w5xde.learn.model.layout import Vector
from w5xde.learn.step.incoming import Unwanted
from w5xde.learn.step.learner import Contribution
from w5xde.messages import Answer, Update
from w5xde.runtime.coordinator.updates import Intake, Took, _fits


class Kept:
    """Stands where the learner's steps are begun."""

    takes_many = True

    def __init__(self) -> None:
        self.leases: list[int] = []

    def arrived(self, lease: int, given: list[Any]) -> None:
        self.leases.append(lease)


class Unclaimed:
    """Nothing is being added."""

    def __init__(self, told: list[ev.Event]) -> None:
        self._told = told

    def spoil(self, node: str, step: int, reason: str) -> None:
        self._told.append(ev.Spoilt(step, reason))

    def is_claimed(self, lease: int) -> bool:
        return False


class Bare(Intake):
    """An intake without a run around it, that is given an answer as if it had come from node a."""

    def __init__(self, kept: Kept, told: list[ev.Event]) -> None:
        self._stepping, self._dispatch = kept, told.append  # type: ignore[assignment]
        self._reception = SimpleNamespace(get=lambda name: None, turn_out=self._turn_out)  # type: ignore[assignment]
        self._learner = SimpleNamespace(trained=frozenset(), vector_bytes=8)  # type: ignore[assignment]
        self.arrivals = Unclaimed(told)  # type: ignore[assignment]
        self.turned_out: list[str] = []

    def _turn_out(self, peer: object, reason: str, abruptly: bool) -> None:
        self.turned_out.append(reason)

    def take_answer(self, answer: Answer, given: list[tuple[Vector, float]], **more: Any) -> None:
        self._answered("a", [answer], given, Took(0.1, 0.1, 1.0), **more)


def bare(*, claimed: bool = False) -> tuple[Bare, Kept, list[ev.Event]]:
    told: list[ev.Event] = []
    kept = Kept()
    intake = Bare(kept, told)
    intake.arrivals.is_claimed = lambda lease: claimed  # type: ignore[method-assign]
    return intake, kept, told


NOTHING = Vector(torch.zeros(0, dtype=torch.uint8), [])


@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e31])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stretch_with_a_loss_that_is_no_number_is_refused(wild: float, place: int) -> None:
    intake, kept, told = bare()
    losses = [1.0, 1.0, 1.0]
    losses[place] = wild
    intake.take_answer(Answer(7, losses=losses), [(NOTHING, 1.0)] * 3)
    assert kept.leases == []
    assert [type(event) for event in told] == [ev.Failed]


@pytest.mark.parametrize(
    ("answer", "apart", "fits"),
    [
        (Answer(1), 0, True),
        (Answer(1, losses=[1.0]), 0, False),
        (Answer(1, losses=[1.0, 2.0]), 2, True),
        (Answer(1, losses=[1.0]), 2, False),
        (Answer(1), 2, False),
        (Answer(1, losses=[1.0, 2.0], absents=[[0]]), 2, False),
        (Answer(1, losses=[1.0, 2.0], absents=[[0], []]), 2, True),
        (Answer(1, losses=[1.0, 2.0], absents=[[9], []]), 2, False),
        (Answer(1, losses=[1.0, 2.0], codec="bf16"), 2, False),
        (Answer(1, absent=[9]), 0, False),
    ],
)
def test_an_answer_must_fit_what_was_lent(answer: Answer, apart: int, fits: bool) -> None:
    assert _fits(answer, apart, frozenset({0, 1})) == fits


def test_what_was_added_and_is_not_finite_spoils_its_step() -> None:
    intake, kept, told = bare()
    intake.take_answer(Answer(7), [(NOTHING, math.inf)], added_in=3)
    assert kept.leases == []
    assert [type(event) for event in told] == [ev.Failed, ev.Spoilt]
    assert told[1].step == 3  # type: ignore[union-attr]


def test_what_was_added_and_is_refused_spoils_its_step() -> None:
    intake, kept, told = bare()
    kept.forget = lambda lease: [Contribution(NOTHING, frozenset(), 1.0, 1.0, added_in=3)]  # type: ignore[attr-defined]
    intake.reject(ev.Reject("a", 7, "its norm is 1e9"))
    assert told == [ev.Spoilt(3, "what a gave is refused")]


def test_what_was_only_kept_and_is_refused_spoils_nothing() -> None:
    intake, kept, told = bare()
    kept.forget = lambda lease: [Contribution(NOTHING, frozenset(), 1.0, 1.0)]  # type: ignore[attr-defined]
    intake.reject(ev.Reject("a", 7, "somebody else was sooner"))
    assert told == []


def test_nothing_is_taken_for_a_place_where_something_is_being_added() -> None:
    intake, kept, told = bare(claimed=True)
    intake.take_answer(Answer(7), [(NOTHING, 1.0)])
    assert kept.leases == []
    assert told == [ev.Dropped("a", 7)]


def test_an_update_is_not_taken_for_another_that_is_about_to_come() -> None:
    """Its memory has not been filled, and nobody has looked at what lies there."""
    intake, kept, told = bare()
    said, coming = Update(0, [Answer(7)]), Update(0, [Answer(7)])
    peer: Any = SimpleNamespace(works=[({7: 0}, 1, 0.0)], arrival=Unwanted(), arrival_of=coming)
    intake.updated(peer, said, bytearray())
    assert (kept.leases, told) == ([], [])
    assert intake.turned_out == ["its answer does not fit what it was lent"]
