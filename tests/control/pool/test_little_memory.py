"""Every mode lends a node no more than it can hold, and lends the rest to others."""

from __future__ import annotations

import random

import pytest

from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan
from w5xde.robust_rule import parse_robust

FITS = 3
BATCHES = 64
MODES = {
    "sync": CoreSettings("sync"),
    "robust": CoreSettings("sync", robust=parse_robust("trim:1")),
    "async": CoreSettings("async"),
    "async, stretches": CoreSettings("async", stretches=True),
}


class Run:
    """Nodes that compute one message after the other; `small` drops each of more than three batches."""

    def __init__(self, settings: CoreSettings, step_batches: int) -> None:
        plan = Plan(step_batches=step_batches, epoch_limit=20, step_limit=None, samples=BATCHES, batch_size=1)
        self.core = CoordinatorCore(plan, settings, None, random.Random(7))
        self.now = 0.0
        self.works: list[tuple[str, list[Lease]]] = []
        self.dropped: list[int] = []
        self.held: list[int] = []
        self.notes: list[str] = []
        self.finish: ev.Finish | None = None

    def tell(self, event: ev.Event) -> None:
        waiting = [event]
        while waiting:
            for effect in self.core.handle(waiting.pop(0), self.now):
                match effect:
                    case ev.Assign():
                        self.works.append((effect.node, effect.leases))
                    case ev.Step():
                        waiting.append(ev.Stepped([effect.plan.index]))
                    case ev.Note(kind="little memory"):
                        self.notes.append(effect.text)
                    case ev.Finish():
                        self.finish = effect

    def work(self) -> None:
        self.now += 0.001
        if not self.works:
            self.tell(ev.Ticked(heard={member.name: self.now for member in self.core.view.members}))
            return
        node, leases = self.works.pop(0)
        batches = sum(lease.span.count for lease in leases)
        if node == "small" and batches > FITS:
            self.dropped.append(batches)
            for lease in leases:
                self.tell(ev.Dropped(node, lease.id, batches))
            return
        if node == "small":
            self.held.append(batches)
        for lease in leases:
            self.tell(ev.Answered(node, [lease.id], 0.0001, 0.0001))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [0, 3])
def test_a_node_that_drops_what_it_cannot_hold_is_lent_less_until_it_fits(mode: str, others: int) -> None:
    run = Run(MODES[mode], 1 if "stretches" in mode else 16)
    for name in ["small", *(f"large-{i}" for i in range(others))]:
        run.tell(ev.Joined(name))
    for _ in range(200_000):
        if run.finish is not None:
            break
        run.work()
    assert run.finish is not None
    assert run.finish.error == ""
    # It halves: of each size it drops at most what was on its way already.
    assert run.held
    assert max(run.held) <= FITS
    assert len(run.dropped) <= 2 * 6, run.dropped
    assert len(run.notes) <= 6
    if others == 0:
        assert run.dropped
