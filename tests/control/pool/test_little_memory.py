"""Every mode lends a node no more than it can hold, and lends the rest to others."""

from __future__ import annotations

import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.specs.robust_rule import parse_robust

FITS = 3
BATCHES = 64
MODES = {
    "sync": CoreSettings("sync"),
    "robust": CoreSettings("sync", robust=parse_robust("trim:1")),
    "async": CoreSettings("async"),
    "async, stretches": CoreSettings("async", stretches=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [0, 3])
def test_a_node_that_drops_what_it_cannot_hold_is_lent_less_until_it_fits(mode: str, others: int) -> None:
    step_batches = 1 if "stretches" in mode else 16
    plan = Plan(step_batches=step_batches, epoch_limit=20, step_limit=None, samples=BATCHES, batch_size=1)
    driver = Driver(plan, MODES[mode])
    # So quick that each node is lent as much as the mode allows.
    driver.batch_seconds = 0.0001
    sent: list[int] = []

    def node(work: ev.Assign) -> list[ev.Event]:
        if work.node != "small":
            return driver.answer(work)
        sent.append(sum(lease.span.count for lease in work.leases))
        if sent[-1] <= FITS:
            return driver.answer(work)
        return [ev.Dropped(work.node, lease.id, sent[-1]) for lease in work.leases]

    driver.node = node
    driver.join("small", *(f"large-{i}" for i in range(others)))
    driver.run()
    assert driver.finish == ev.Finish("all steps done")
    dropped = [batches for batches in sent if batches > FITS]
    assert len(dropped) < len(sent)
    # It halves: of each size it drops at most what was on its way already.
    assert len(dropped) <= 2 * 6, dropped
    assert len([note for note in only(ev.Note, driver.effects) if note.kind == "little memory"]) <= 6
    # One node alone is never lent a stretch.
    if (others == 0) != ("stretches" in mode):
        assert dropped
