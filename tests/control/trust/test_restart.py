"""What trust remembers over a restart: usual norms are part of the cut, and older cuts have none."""

from __future__ import annotations

import msgspec
import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.plan import Plan
from w5xde.control.trust.failures import SECOND_OPINION
from w5xde.control.trust.norm_limits import AUTO, KNOWN_MIN

OWN_NORM = 1.0
# Far below that: the run has learned something.
USUAL = 0.01


class Pool(Driver):
    """Two nodes whose updates have the norm that the test wants."""

    def __init__(self, cut: Cut | None = None) -> None:
        plan = Plan(step_batches=1, epoch_limit=None, step_limit=1000, samples=4000, batch_size=4)
        super().__init__(plan, CoreSettings("sync", max_update_norm=AUTO, own_norm=OWN_NORM), cut)
        self.join("a", "b")

    def is_doubted(self, norm: float) -> bool:
        self.node = lambda work: self.answer(work, norm)
        return any(note.kind == SECOND_OPINION for note in only(ev.Note, self.work()))


@pytest.fixture
def facts() -> dict[str, object]:
    """The cut of a run that knows what is usual, as a checkpoint holds it."""
    pool = Pool()
    for _ in range(2 * KNOWN_MIN):
        pool.is_doubted(USUAL)
    cut = pool.core.view.cut(0.0)
    return dict(msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(cut, str_keys=True))))


def resumed(facts: dict[str, object]) -> Pool:
    return Pool(msgspec.convert(facts, Cut, str_keys=True))


def test_what_is_usual_is_known_at_once_after_a_restart(facts: dict[str, object]) -> None:
    assert not Pool().is_doubted(5 * OWN_NORM)
    assert resumed(facts).is_doubted(5 * OWN_NORM)
    assert not resumed(facts).is_doubted(5 * USUAL)


def test_a_checkpoint_from_before_norms_were_kept_still_loads(facts: dict[str, object]) -> None:
    del facts["usual_norms"]
    progress = facts["progress"]
    assert isinstance(progress, dict)
    del progress["verified_batches"], progress["unverified_batches"]
    pool = resumed(facts)
    assert not pool.is_doubted(5 * OWN_NORM)
    assert pool.is_doubted(1e8)
