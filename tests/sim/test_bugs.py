"""A test of the tests: bugs planted in the real code, each of which the simulator must find by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.sim.scenario import Scenario
from tests.sim.world import Failure, World
from w5xde.control import events as ev
from w5xde.control import modes
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.leases import Lease, Leases
from w5xde.control.members import Members
from w5xde.control.modes import Async, Sync
from w5xde.control.node import NodeCore
from w5xde.control.plan import Plan
from w5xde.control.work import StepWork
from w5xde.tree import PairwiseTree

SEEDS = 300


class Bug(NamedTuple):
    """What is put where, and the sentence by which it is found out."""

    owner: Any
    name: str
    planted: Callable[..., Any] | int
    found: str


def settle_ignores_the_node(self: Leases, lease: int, node: str) -> Lease | str:
    held = self._leases.get(lease)
    if held is None:
        return "not outstanding"
    self.end(held)
    return held


def settle_forgets_to_end(self: Leases, lease: int, node: str) -> Lease | str:
    held = self._leases.get(lease)
    return held if held is not None and held.node == node else "not outstanding"


def takes_one_too_stale(self: Async, lease: Lease, version: int) -> str:
    return "stale" if version - lease.version > self._staleness + 1 else ""


def merges_in_order_of_arrival(self: PairwiseTree[Any], span: Any, value: Any) -> list[Any]:
    merge = self._merge
    self._merge = lambda left, right: merge(value, left if right is value else right)
    try:
        return PUT(self, span, value)
    finally:
        self._merge = merge


def stops_without_closing(self: CoordinatorCore, event: ev.Stop, now: float) -> list[ev.Effect]:
    self._stop_reason = event.reason
    return self._finish_if_settled()


def gives_back_but_tells_nobody(self: Async, lease: Lease, *, failed: bool = False) -> StepWork | None:
    work = self._works.get(lease.step.index)
    if work is not None:
        work.give_back(lease.span, self.leases.of_step(lease.step.index))
    return work


def forgets_the_short_batch(self: Plan) -> tuple[tuple[int, ...], bool]:
    sizes, ends_epoch = SIZES(self)
    whole = tuple(size for size in sizes if size == self._batch_size)
    return whole or sizes, ends_epoch


def computes_what_a_broken_connection_left(self: NodeCore, reason: str, now: float) -> Any:
    kept = list(self._queue)
    effects = LOST(self, reason, now)
    self._queue.extend(kept)
    return effects


PUT, SIZES, LOST = PairwiseTree.put, Plan._sizes, NodeCore._lost

BUGS = {
    "give_back forgets": Bug(StepWork, "give_back", lambda self, span, leases: 0, "is lost"),
    "failed batches are forgotten": Bug(StepWork, "failed", lambda self, span, node, leases: None, "is lost"),
    "settle ignores the node": Bug(Leases, "settle", settle_ignores_the_node, "is folded as|outstanding are"),
    "a lease is settled twice": Bug(Leases, "settle", settle_forgets_to_end, "outstanding|node's hands"),
    "a covered span is taken": Bug(Sync, "admit", lambda self, lease, version: "", "already"),
    "one version too stale": Bug(Async, "admit", takes_one_too_stale, "versions old"),
    "of_node misses a lease": Bug(
        Leases, "of_node", lambda self, node: [x for x in self if x.node == node][1:], "outstanding are"
    ),
    "leases of a finished step go on": Bug(Leases, "of_step", lambda self, step: [], "outstanding|lost"),
    "silent nodes are never closed": Bug(Members, "silent", lambda self, now: [], "still here"),
    "our own stop is blamed on the nodes": Bug(
        Members, "forgive_stall", lambda self, now, expected_seconds: 0.0, "s of silence"
    ),
    "sums in order of arrival": Bug(PairwiseTree, "put", merges_in_order_of_arrival, "summed as"),
    "a step begins after the stop": Bug(CoordinatorCore, "_stop", stops_without_closing, "is to stop"),
    "a node holds three leases": Bug(modes, "WINDOW_LEASES", 3, "3 leases, 2 are allowed"),
    "a short batch is forgotten": Bug(Plan, "_sizes", forgets_the_short_batch, "not as planned"),
    "a step given back is never lent": Bug(Async, "give_back", gives_back_but_tells_nobody, "not finished"),
    "leases outlive their connection": Bug(
        NodeCore, "_lost", computes_what_a_broken_connection_left, "answers|pop from an empty deque"
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_simulator_finds_it(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.name, bug.planted)
    for seed in range(SEEDS):
        try:
            World(Scenario.of_seed(seed)).run()
        except Failure as failure:
            if re.search(bug.found, str(failure)):
                return
    pytest.fail(f"{SEEDS} seeds did not find it")
