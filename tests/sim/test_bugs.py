"""A test of the tests: bugs planted in the real code, each of which the simulator must find by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tests.sim.disk import File, VirtualDisk
from tests.sim.scenario import ROUNDS, Scenario
from tests.sim.world import Failure, World
from w5xde.control import events as ev
from w5xde.control.answers import Answers
from w5xde.control.modes import sync as modes
from w5xde.control.modes.async_mode import AsyncMode
from w5xde.control.modes.sync import SyncMode
from w5xde.control.modes.validation import Validation
from w5xde.control.node import NodeCore
from w5xde.control.pool.members import Members
from w5xde.control.run_state import RunState
from w5xde.control.step_decisions import StepDecisions
from w5xde.control.steps import open_step
from w5xde.control.steps.cut import Accounts
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep
from w5xde.control.steps.plan import Cursor, Plan, StepPlan
from w5xde.control.trust.failures import Failures
from w5xde.control.trust.norm_limits import NormLimits
from w5xde.control.trust.rollback import Rollback
from w5xde.control.uploads import UploadQueue
from w5xde.control.validation_decisions import ValidationDecisions
from w5xde.learn.rounds.rounds import Rounds
from w5xde.learn.step.sums import TreeSums
from w5xde.messages import Rejected, Update
from w5xde.runtime.durable import journal, ledger_segments
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger import Ledger, Syncing
from w5xde.runtime.durable.step_log import StepLog
from w5xde.runtime.pipeline.lending import Lending
from w5xde.runtime.pipeline.peer import Peer, SentParams
from w5xde.runtime.pipeline.steps import Applied, Steps
from w5xde.runtime.pipeline.updates import Updates
from w5xde.specs.round_lengths import RoundLengths
from w5xde.tree import PairwiseTree, Span

SEEDS = 1000


class Bug(NamedTuple):
    """What is put where, and the sentence by which it is found out."""

    owner: Any
    name: str
    planted: Callable[..., Any] | property | int
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


def takes_one_too_stale(self: AsyncMode, lease: Lease) -> str:
    return "stale" if self.staleness_of(lease) > self.staleness + 1 else ""


def merges_in_order_of_arrival(self: PairwiseTree[Any], span: Any, value: Any) -> list[Any]:
    merge = self._merge
    self._merge = lambda left, right: merge(value, left if right is value else right)
    try:
        return PUT(self, span, value)
    finally:
        self._merge = merge


def stops_without_closing(self: RunState, stop: ev.Stop, now: float) -> list[ev.Effect]:
    self._stop = stop
    return self.finish_if_settled()


def gives_back_but_tells_nobody(self: AsyncMode, lease: Lease, *, failed: bool = False) -> OpenStep | None:
    open_step = self._open_steps.get(lease.step.index)
    if open_step is not None:
        open_step.give_back(lease.span, self.leases.of_step(lease.step.index))
    return open_step


def forgets_the_short_batch(self: Plan, batches: int, *, whole: bool) -> tuple[tuple[int, ...], bool]:
    sizes, ends_epoch = SIZES(self, batches, whole=whole)
    full = tuple(size for size in sizes if size == self._batch_size)
    return full or sizes, ends_epoch


def computes_what_a_broken_connection_left(self: NodeCore, reason: str, now: float) -> Any:
    kept = list(self._queue)
    effects = LOST(self, reason, now)
    self._queue.extend(kept)
    return effects


def forgets_what_was_undone(self: Plan, cursor: Cursor, undone: Any) -> None:
    RESUME(self, cursor, ())


def resumes_at_the_next_step(self: Plan, cursor: Cursor, undone: Any) -> None:
    RESUME(self, Cursor(cursor.index + 1, cursor.epoch, cursor.first), undone)


def begins_anew(self: Plan, cursor: Cursor, undone: Any) -> None:
    RESUME(self, Cursor(), ())


def numbers_leases_alike_in_every_life(self: Leases, incarnation: int) -> None:
    LEASES(self, 1)


def writes_the_checkpoint_before_the_ledger(self: Journal, now: float) -> None:
    """What it wrote down waits for the next tick."""


def believes_a_failed_sync(self: Ledger, syncing: Syncing) -> None:
    syncing.error = None
    END_SYNC(self, syncing)


def tells_before_it_is_written(self: Journal, state: Any, cut: Any, facts: Any, now: float) -> None:
    self._dispatch(ev.Saved(cut.progress.steps))
    self._dispatch = lambda event: None
    CAPTURED(self, state, cut, facts, now)


def checks_nothing(self: CheckpointStore, name: str, listed: Any) -> None:
    pass


def captures_no_files(self: Journal, version: int) -> Any:
    return self._capture()


def syncs_no_checkpoints_folder(self: VirtualDisk, name: str = "") -> None:
    if name != "checkpoints":
        SYNC_FOLDER(self, name)


def writes_without_syncing(self: VirtualDisk, name: str, file: File) -> None:
    if not name.startswith("checkpoints"):
        SETTLE(self, name, file)


def forgets_the_gap(self: StepLog, version: int) -> None:
    BEGIN(self, version)
    self._has_gap = False


def forgets_every_segment(disk: VirtualDisk, version: int) -> None:
    for name in disk.names():
        if name.startswith("steps-"):
            disk.remove(name)


def compresses_without_syncing(disk: VirtualDisk, name: str, data: bytes) -> None:
    if name in disk.names():
        disk.remove(name)
    disk.append(name).write(data)


# --- planted in uploads, lending and stepping


def lets_everybody_send_at_once(self: UploadQueue[Any], sender: Any, upload: Any, now: float) -> bool:
    self._begin(sender, upload, now)
    return True


def never_lets_the_next_one_begin(self: UploadQueue[Any], now: float) -> list[Any]:
    return []


def forgets_that_an_upload_ended(self: UploadQueue[Any], sender: Any, now: float) -> list[Any]:
    return []


def believes_what_was_thrown_away(self: Updates, node: str, update: Update, place: Any, timing: Any) -> None:
    self._dispatch(ev.Answered(node, [update.answers[0].lease], *timing, norms=[0.0]))


def forgets_failed_answers(self: Updates, node: str, update: Update, checked: Any, timing: Any) -> None:
    kept = [answer for answer in update.answers if not answer.failure]
    ANSWERED(self, node, replace(update, answers=kept), checked, timing)


def rejects_before_the_node_is_ready(self: Updates, effect: ev.Reject) -> None:
    self._undecided.pop((effect.node, effect.lease), None)
    peer = self._ports.peers.get(effect.node)
    if peer is not None:
        peer.connection.send(Rejected(effect.lease, effect.reason))


def believes_infinite_norms(self: Updates, node: str, update: Update, checked: Any, timing: Any) -> None:
    ANSWERED(self, node, update, [(vector, min(norm, 1.0)) for vector, norm in checked], timing)


def sends_old_parameters(self: Lending, peer: Peer, leases: list[Lease], found: Any) -> None:
    if peer.params.version >= 0:
        self._send_work(peer, leases, found, None)
    else:
        SEND_PARAMETERS(self, peer, leases, found)


def sends_work_before_its_parameters(self: Lending, peer: Peer, leases: list[Lease], found: Any) -> None:
    if peer.params_asked.version >= leases[0].version:
        self._send_work(peer, leases, found, None)
    else:
        SEND_PARAMETERS(self, peer, leases, found)


def drops_leases_without_a_word(
    self: Lending, peer: Peer, leases: list[Lease], found: Any, rates: Any
) -> None:
    if all(self._view.lease(lease.id) is not None for lease in leases):
        SEND_WORK(self, peer, leases, found, rates)


def forgets_what_is_to_be_verified(self: Lending, effect: ev.Assign) -> None:
    LEND(self, ev.Assign(effect.node, effect.leases))


def steps_whatever_the_version(self: Steps, steps: list[ev.Step]) -> Any:
    return [self._sums.total(step) for step in steps], None


def reports_rolled_back_steps_as_made(self: Steps, outcome: Any) -> None:
    done, *others = outcome
    made = [Applied(each.step, [0.0], False) if isinstance(each, ev.Undone) else each for each in done]
    REPORT(self, (made, *others))


def forgets_rolled_back_steps(self: Steps, outcome: Any) -> None:
    done, *others = outcome
    REPORT(self, ([each for each in done if not isinstance(each, ev.Undone)], *others))


def opens_whatever_is_applied(self: Validation, version: int, *, is_applied: bool) -> None:
    OPEN_VALIDATION(self, version, is_applied=True)


def accepts_unverified(self: ValidationDecisions, event: ev.Measured, now: float) -> list[ev.Effect]:
    return self.accept(event.node, event.lease, now)


def releases_batches_when_they_are_folded(self: Steps, effect: ev.Fold, given: Any) -> None:
    FOLD(self, effect, given)
    self._ports.batches.release(effect.lease.step.keys)


def leaves_no_gap_for_set_aside_batches(self: TreeSums, step: Any, spans: Any) -> None:
    pass


def keeps_the_sums_of_a_step_that_begins_anew(self: TreeSums, step: int) -> None:
    pass


def logs_steps_after_the_core_heard(self: Steps, step: ev.Step, total: Any, cut: Any) -> bool:
    return True


PUT, SIZES, LOST = PairwiseTree.put, Plan._peek_sizes, NodeCore._lost
RESUME, LEASES, END_SYNC, CAPTURED = Plan.resume, Leases.__init__, Ledger.end_sync, Journal._captured
ANSWERED, REPORT, FOLD = Updates._answered, Steps._report, Steps.fold
OPEN_VALIDATION = Validation.open_if_ready
LEND, SEND_PARAMETERS, SEND_WORK = Lending.lend, Lending._send_parameters, Lending._send_work
SYNC_FOLDER, SETTLE, BEGIN = VirtualDisk.sync_folder, VirtualDisk.settle, StepLog.begin


def believes_the_verified(self: Answers, event: ev.Verified, now: float) -> list[ev.Effect]:
    norm = self._state.verification.end(event.lease)
    return self._accept(event.node, event.lease, norm, now, verified=True)


# --- planted in rounds


def begins_a_round_with_the_last_step_of_the_one_before(self: Plan) -> StepPlan | None:
    planned = NEXT_STEP(self)
    if planned is not None and planned.steps > 1 and not planned.ends_epoch:
        index, epoch, first = self.cursor.index, self.cursor.epoch, self.cursor.first
        self.cursor = Cursor(index, epoch, first - planned.columns)
    return planned


def completes_a_round_without_its_last_column(self: OpenStep, span: Span, shares: Any) -> bool:
    is_complete = TAKE(self, span, shares)
    missing = [leaf for i in range(self.plan.count) if not self.tree.covers(leaf := Span(i, i + 1))]
    if not self.plan.columns or len(missing) != 1 or self.free:
        return is_complete
    return TAKE(self, missing[0], [])


def lends_two_columns_at_once(self: OpenStep, node: str, want: int, members: Any) -> Span | None:
    span = TAKE_FREE_SPAN(self, node, want, members)
    after = next((free for free in self.free if span is not None and free.start == span.stop), None)
    if span is None or after is None or span.start % 2 or after.count > 1:
        return span
    self.free.remove(after)
    self.free_batches -= 1
    return Span(span.start, after.stop)


def ends_leases_without_a_word(self: Rollback, step: int) -> list[ev.Effect]:
    CANCEL_LEASES(self, step)
    return []


def sets_only_the_first_batch_of_a_column_aside(
    self: Failures, work: OpenStep, lease: Lease, reason: str
) -> list[ev.Effect]:
    before = len(self._tally.accounts.aside)
    effects = SET_ASIDE(self, work, lease, reason)
    del self._tally.accounts.aside[before + 1 :]
    return effects


def plans_an_open_round_anew(self: Plan, cursor: Cursor, undone: Any) -> None:
    begun = [step for step in undone if step.steps > 1]
    if begun:
        # One step of it, and the next round after that.
        step = begun[0]
        short = StepPlan(
            step.index, step.epoch, step.first, step.sizes[: step.columns], False, False, step.columns
        )
        undone = [short, *(each for each in undone if each is not step)]
        cursor = Cursor(step.index + 1, step.epoch, step.first + step.columns)
    RESUME(self, cursor, undone)


def logs_a_round_as_one_step(self: StepLog, record: dict[str, Any], body: Any) -> bool:
    return WRITE(self, record | {"steps": 1}, body)


def leaves_out_the_first_difference(self: Rounds, version: int, digest: bytes, newest: int) -> Any:
    found = SINCE(self, version, digest, newest)
    return found[1:] if found and len(found) > 1 else found


def sends_the_first_difference_twice(self: Rounds, version: int, digest: bytes, newest: int) -> Any:
    found = SINCE(self, version, digest, newest)
    return [found[0], *found] if found else found


def believes_what_a_node_announces(self: Rounds, version: int, digest: bytes, newest: int) -> Any:
    return SINCE(self, version, b"", newest)


def sends_replicas_again_that_are_good(self: Lending) -> None:
    for peer in self._ports.peers:
        peer.params = peer.params_asked = min(peer.params, SentParams(self._view.version - 1))


def blames_a_node_for_each_work(self: Updates, peer: Peer) -> bool:
    is_forgiven = FORGIVE(self, peer)
    peer.works_forgiven = 0
    return is_forgiven


NEXT_STEP, TAKE, TAKE_FREE_SPAN = Plan.next_step, OpenStep.take, OpenStep.take_free_span
CANCEL_LEASES, SET_ASIDE, WRITE = Rollback.cancel_leases, Failures.set_aside, StepLog.write
SINCE, FORGIVE = Rounds.since, Updates._forgive_replica

ROUND_BUGS = {
    "a step is in two rounds": Bug(
        Plan, "next_step", begins_a_round_with_the_last_step_of_the_one_before, "is not as planned"
    ),
    "a round is longer than planned": Bug(
        RoundLengths, "at", lambda self, step: self.most + 1, "steps, . were planned|AssertionError: steps"
    ),
    "a round grows by the steps that were applied": Bug(
        StepPlan, "steps", property(lambda self: 1), "were planned"
    ),
    "a round lacks a column": Bug(
        OpenStep, "take", completes_a_round_without_its_last_column, "the learner broke|is shared out"
    ),
    "two columns are lent at once": Bug(
        OpenStep, "take_free_span", lends_two_columns_at_once, "is not one column"
    ),
    "leases of a complete round end without a word": Bug(
        Rollback, "cancel_leases", ends_leases_without_a_word, "outstanding are"
    ),
    "a round makes one version": Bug(ev.Step, "steps", property(lambda self: 1), "version . after"),
    "only a column's first batch is set aside": Bug(
        Failures, "set_aside", sets_only_the_first_batch_of_a_column_aside, "epochs of|are set aside"
    ),
    # --- what must survive
    "an open round is planned anew": Bug(Plan, "resume", plans_an_open_round_anew, "were planned|as planned"),
    "a logged round is replayed as one step": Bug(StepLog, "write", logs_a_round_as_one_step, "were durable"),
    # --- replicas
    "a difference is left out": Bug(Rounds, "since", leaves_out_the_first_difference, "what changed after"),
    "a difference is sent twice": Bug(
        Rounds, "since", sends_the_first_difference_twice, "what changed after"
    ),
    "a replica is believed without its hash": Bug(
        Rounds, "since", believes_what_a_node_announces, "summed as|another version|another replica"
    ),
    "a new node hears nothing of the last round": Bug(
        Rounds, "last_sent", lambda self, version: None, "summed as|another replica"
    ),
    "after a rollback a difference comes again": Bug(
        Lending, "rewind", sends_replicas_again_that_are_good, "what changed after"
    ),
    "one lost replica counts twice": Bug(Updates, "_forgive_replica", blames_a_node_for_each_work, "evicted"),
}  # fmt: skip


BUGS = {
    "give_back forgets": Bug(OpenStep, "give_back", lambda self, span, leases: 0, "is lost"),
    "failed batches are forgotten": Bug(OpenStep, "failed", lambda self, span, node, leases: None, "is lost"),
    "settle ignores the node": Bug(Leases, "settle", settle_ignores_the_node, "is folded as|outstanding are"),
    "a lease is settled twice": Bug(Leases, "settle", settle_forgets_to_end, "outstanding|node's hands"),
    "a covered span is taken": Bug(SyncMode, "admit", lambda self, lease: "", "already"),
    "one version too stale": Bug(AsyncMode, "admit", takes_one_too_stale, "updates old"),
    "of_node misses a lease": Bug(
        Leases, "of_node", lambda self, node: [x for x in self if x.node == node][1:], "outstanding are"
    ),
    "leases of a finished step go on": Bug(Leases, "of_step", lambda self, step: [], "outstanding|lost"),
    "silent nodes are never closed": Bug(Members, "silent", lambda self, now: [], "still here"),
    "our own stop is blamed on the nodes": Bug(
        Members, "forgive_stall", lambda self, now, expected_seconds: 0.0, "s of silence"
    ),
    "sums in order of arrival": Bug(PairwiseTree, "put", merges_in_order_of_arrival, "summed as"),
    "a step begins after the stop": Bug(RunState, "stop", stops_without_closing, "is to stop"),
    "a node holds three leases": Bug(modes, "WINDOW_LEASES", 3, "3 leases, 2 are allowed"),
    "a short batch is forgotten": Bug(Plan, "_peek_sizes", forgets_the_short_batch, "not as planned"),
    "a step given back is never lent": Bug(
        AsyncMode, "give_back", gives_back_but_tells_nobody, "not finished"
    ),
    "leases outlive their connection": Bug(
        NodeCore, "_lost", computes_what_a_broken_connection_left, "is evicted"
    ),
    # --- uploads, lending and stepping
    "all large updates arrive at once": Bug(
        UploadQueue, "ask", lets_everybody_send_at_once, "large updates arrive at a time"
    ),
    "an upload that waits is never continued": Bug(
        UploadQueue, "tick", never_lets_the_next_one_begin, "not finished"
    ),
    "an upload never ends": Bug(UploadQueue, "end", forgets_that_an_upload_ended, "not finished|at a time"),
    "an update that was thrown away counts": Bug(
        Updates, "_checked", believes_what_was_thrown_away, "KeyError|its answer is not here"
    ),
    "failed answers are forgotten": Bug(
        Updates, "_answered", forgets_failed_answers, "not finished|still here|outstanding"
    ),
    "infinite norms are believed": Bug(Updates, "_answered", believes_infinite_norms, "a lie is folded"),
    "a node hears of its old answer too soon": Bug(
        Updates, "reject", rejects_before_the_node_is_ready, "before it is ready"
    ),
    "nodes compute on old parameters": Bug(
        Lending, "_send_parameters", sends_old_parameters, "summed as|versions old"
    ),
    "work overtakes its parameters": Bug(
        Lending, "_send_parameters", sends_work_before_its_parameters, "summed as|versions old"
    ),
    "leases that need not be sent are forgotten": Bug(
        Lending, "_send_work", drops_leases_without_a_word, "was never sent"
    ),
    "versions that will never be are waited for": Bug(
        Lending, "rewind", lambda self: None, "summed as|versions old|and is sent"
    ),
    "what is to be verified is not kept": Bug(
        Lending, "lend", forgets_what_is_to_be_verified, "was not kept for that"
    ),
    "steps are made out of order": Bug(
        Steps, "_totals", steps_whatever_the_version, "is made of batches|is the sum of"
    ),
    "rolled back steps are reported as made": Bug(
        Steps, "_report", reports_rolled_back_steps_as_made, "steps are counted|count|released before"
    ),
    "rolled back steps are forgotten": Bug(Steps, "_report", forgets_rolled_back_steps, "not finished"),
    "batches are released too soon": Bug(
        Steps, "fold", releases_batches_when_they_are_folded, "released before"
    ),
    "set-aside batches leave no gap": Bug(
        TreeSums, "leave_empty", leaves_no_gap_for_set_aside_batches, "ValueError|the learner broke"
    ),
    "a step that begins anew keeps its sums": Bug(
        TreeSums, "drop", keeps_the_sums_of_a_step_that_begins_anew, "is the sum of"
    ),
    "a step is durable before it is logged": Bug(
        Steps, "_log", logs_steps_after_the_core_heard, "were durable"
    ),
    "the first update is believed, however large": Bug(
        NormLimits, "_guess", lambda self, size: math.inf, "a lie is folded"
    ),
    "a verified answer is not compared": Bug(Answers, "verified", believes_the_verified, "a lie is"),
    # --- validation
    "steps are made while a validation is open": Bug(
        Validation, "is_under_way", property(lambda self: False), "in the middle of|another version"
    ),
    "a validation begins before a step is applied": Bug(
        Validation, "open_if_ready", opens_whatever_is_applied, "another version|after other steps"
    ),
    "steps that were put off are forgotten": Bug(
        StepDecisions, "_decide_put_off", lambda self, now: [], "not finished"
    ),
    "what a cheat measured is kept": Bug(
        ValidationDecisions, "measured", accepts_unverified, "was measured as"
    ),
    "a lost validation lease is not lent again": Bug(
        Validation, "give_back", lambda self, lease, **how: None, "not finished"
    ),
    # --- what must survive
    "what was undone is forgotten": Bug(
        Plan, "resume", forgets_what_was_undone, "all done|hole|not finished"
    ),
    "a step is skipped at resume": Bug(Plan, "resume", resumes_at_the_next_step, "not as planned"),
    "weights are restored, not the cursor": Bug(Plan, "resume", begins_anew, "counts 2 times|again"),
    "lease numbers come again in the next life": Bug(
        Leases, "__init__", numbers_leases_alike_in_every_life, "is given twice|wrong life"
    ),
    "the ledger follows the checkpoint": Bug(
        Journal, "_flush", writes_the_checkpoint_before_the_ledger, "steps are recorded|the audit"
    ),
    "a failed sync is believed": Bug(
        Ledger, "end_sync", believes_a_failed_sync, "does not follow|the audit|no line has the hash"
    ),
    "a compressed segment is not synced": Bug(
        ledger_segments, "replace", compresses_without_syncing, "decompress|not a compressed segment"
    ),
    "the open segment is compressed": Bug(
        Ledger, "closed_segments", property(lambda self: self._number), "no line has the hash|follow|recorded"
    ),
    "durable is said too early": Bug(Journal, "_captured", tells_before_it_is_written, "were durable"),
    "a step counts before it is logged": Bug(
        StepLog, "write", lambda self, record, body: True, "were durable"
    ),
    "what was logged last is not synced again": Bug(
        StepLog, "resume", lambda self, version, last: self.begin(version), "were durable"
    ),
    "the step log is dropped too early": Bug(journal, "forget_steps", forgets_every_segment, "were durable"),
    "a gap in the step log goes unnoticed": Bug(StepLog, "begin", forgets_the_gap, "were durable"),
    "a damaged checkpoint is loaded": Bug(
        CheckpointStore, "_check_file", checks_nothing, "Error|the weights are not the same|counts"
    ),
    "a large model is saved while it changes": Bug(
        Journal, "_capture_at", captures_no_files, "Error|the weights are not the same|counts"
    ),
    "a checkpoint's name is not synced": Bug(
        VirtualDisk, "sync_folder", syncs_no_checkpoints_folder, "were durable"
    ),
    "a checkpoint's bytes are not synced": Bug(
        VirtualDisk, "settle", writes_without_syncing, "were durable|no checkpoint"
    ),
    "a batch is set aside too soon": Bug(open_step, "ATTEMPTS_MAX", 2, "after 2 failures"),
    "a few speak for all": Bug(open_step, "failing_nodes_required", lambda nodes: 1, "tried"),
    "an epoch is complete without a batch": Bug(
        Accounts, "aside_of", lambda self, epoch: [], "epochs of|set aside|never counted"
    ),
}  # fmt: skip


def require_found(bug: Bug, seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            World(Scenario.of_seed(seed)).run()
        except Failure as failure:
            if re.search(bug.found, str(failure)):
                return
    pytest.fail("no seed found it")


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_simulator_finds_it(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.name, bug.planted)
    require_found(bug, range(SEEDS))


@pytest.mark.parametrize("bug", ROUND_BUGS.values(), ids=ROUND_BUGS)
def test_the_simulator_finds_it_in_rounds(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.name, bug.planted)
    require_found(bug, (seed for seed in range(SEEDS) if seed % 16 in ROUNDS))


def test_a_gap_in_the_step_log_is_not_found_by_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several seeds in three hundred: another change of the generator must not lose the only one."""
    bug = BUGS["a gap in the step log goes unnoticed"]
    monkeypatch.setattr(bug.owner, bug.name, bug.planted)
    found = []
    for seed in range(11, 300, 16):
        try:
            World(Scenario.of_seed(seed)).run()
        except Failure as failure:
            found += [seed] if re.search(bug.found, str(failure)) else []
    assert len(found) >= 3, found
