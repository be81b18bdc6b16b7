"""An honest update may be unusual: only a second opinion that differs is news."""

from __future__ import annotations

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.failures import SECOND_OPINION
from w5xde.control.trust.norm_limits import AUTO

OWN_NORM = 1.0
HUGE = 1000.0


class Pool(Driver):
    """Nodes of which each finds the norm that a test gives it; the coordinator's own opinion is the same."""

    def __init__(self, norms: dict[str, list[float]], limit: float | str = AUTO) -> None:
        plan = Plan(step_batches=1, epoch_limit=1, step_limit=None, samples=12, batch_size=4)
        super().__init__(plan, CoreSettings("sync", max_update_norm=limit, own_norm=OWN_NORM))
        self._norms = norms
        self.node = lambda work: self.answer(work, self._next(work.node))
        self.join(*norms)

    def _next(self, node: str) -> float:
        found = self._norms[node]
        return found.pop(0) if found else OWN_NORM

    def perform(self, effect: ev.Effect) -> list[ev.Event]:
        if isinstance(effect, ev.Verify):
            return [ev.Verified(effect.lease.node, effect.lease.id)]
        return super().perform(effect)

    def notes(self) -> list[str]:
        """The kinds of notes about updates."""
        self.run()
        assert self.finish == ev.Finish("all steps done")
        kinds = [note.kind for note in only(ev.Note, self.effects)]
        return [kind for kind in kinds if kind not in ("joined", "epoch")]


def test_a_second_node_that_agrees_is_no_news() -> None:
    assert set(Pool({"a": [HUGE], "b": [HUGE]}).notes()) == {SECOND_OPINION}


def test_a_coordinator_that_agrees_with_the_only_node_is_no_news() -> None:
    assert set(Pool({"a": [HUGE, HUGE]}).notes()) == {SECOND_OPINION}


def test_a_second_node_that_disagrees_is_told() -> None:
    assert "fault" in Pool({"a": [HUGE], "b": []}).notes()


def test_a_node_that_disagrees_with_itself_is_told() -> None:
    pool = Pool({"a": [HUGE, OWN_NORM]})
    assert pool.notes() == [SECOND_OPINION, "doubt"]
    told = next(note for note in only(ev.Note, pool.effects) if note.kind == "doubt")
    assert told.text == "what a gave for batch 0 of epoch 1 first was wrong, and did not count"


def test_an_update_above_a_limit_that_the_user_set_is_told_once() -> None:
    """It needs no second opinion, so nothing is learned when the same node does better."""
    assert Pool({"a": [HUGE, OWN_NORM]}, limit=10.0).notes() == ["doubt"]
