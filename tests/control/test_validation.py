"""Validation leases: one version for all batches, no step meanwhile, and an end whatever nodes do."""

from __future__ import annotations

import pytest

from tests.control.driver import Driver, only
from w5xde.control import events as ev
from w5xde.control.modes.validation import LEASE_BATCHES_MAX
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.plan import Plan
from w5xde.control.validation_decisions import ALONE_SECONDS

SIZES = (4, 4, 4, 4, 1)


def driver(mode: str = "sync", steps: int = 4, sizes: tuple[int, ...] = SIZES, **more: object) -> Driver:
    plan = Plan(step_batches=2, epoch_limit=None, step_limit=steps, samples=2 * steps, batch_size=1)
    given: dict[str, object] = {"evaluates": True, "evaluate_every": 2, "validation_sizes": sizes}
    return Driver(plan, CoreSettings(mode, **given | more))  # type: ignore[arg-type]


def is_validating(run: Driver) -> bool:
    return any(work.leases[0].step.validates for work in run.works)


def measured(run: Driver) -> list[tuple[int, int]]:
    """The version and the number of each batch whose measure counts, in order."""
    kept = only(ev.KeepMeasures, run.effects)
    return sorted((each.lease.version, batch) for each in kept for batch in range(*each.lease.span))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_every_batch_counts_once_on_the_version_that_was_due(mode: str, nodes: int) -> None:
    run = driver(mode)
    run.join(*(f"n{number}" for number in range(nodes)))
    run.run()
    concluded = [each.step for each in only(ev.Conclude, run.effects)]
    assert concluded[-1] == 4
    assert len(concluded) >= 2
    assert measured(run) == [(version, batch) for version in concluded for batch in range(len(SIZES))]
    assert only(ev.Evaluate, run.effects) == []
    # Samples of the validation set are no samples of the training.
    assert run.core.view.progress.samples == 8
    assert run.finish is not None
    assert not run.finish.error


def test_no_step_is_decided_before_the_result_and_idle_nodes_work_ahead() -> None:
    run = driver()
    run.join("a", "b")
    run.run(lambda: is_validating(run))
    version = run.core.view.version
    ahead = 0
    while is_validating(run):
        assert run.core.view.version == version
        ahead += any(not work.leases[0].step.validates for work in run.works)
        run.work()
    assert ahead > 0


def test_a_dead_nodes_batches_are_measured_on_the_same_version() -> None:
    run = driver()
    run.join("a", "b")
    run.run(lambda: is_validating(run))
    (work, *_) = [each for each in run.works if each.leases[0].step.validates]
    lost = set(range(*work.leases[0].span))
    run.works = type(run.works)(each for each in run.works if each.node != work.node)
    run.feed(ev.Left(work.node, "connection reset"))
    run.run(lambda: bool(only(ev.Conclude, run.effects)))
    assert measured(run) == [(2, batch) for batch in range(len(SIZES))]
    again = [each for each in only(ev.KeepMeasures, run.effects) if lost & set(range(*each.lease.span))]
    assert {each.lease.node for each in again} == {"a", "b"} - {work.node}


def test_a_batch_that_fails_on_every_node_ends_the_evaluation_and_the_run_goes_on() -> None:
    run = driver()

    def respond(work: ev.Assign) -> list[ev.Event]:
        lease = work.leases[0]
        is_bad = lease.step.validates and lease.span.stop > 4
        return run.fail(work, "it does not compute") if is_bad else run.answer(work)

    run.node = respond
    run.join("a", "b")
    run.run()
    first, last = only(ev.Conclude, run.effects)
    assert (
        "batch 4 of the validation of step 2 fails wherever it is tried: it does not compute" in first.failure
    )
    assert last.failure
    assert run.finish is not None
    assert run.finish.reason == "all steps done"
    assert run.core.view.progress.steps == 4
    assert only(ev.SetAside, run.effects) == []


def test_a_batch_that_cannot_be_read_ends_the_evaluation() -> None:
    run = driver()

    def respond(work: ev.Assign) -> list[ev.Event]:
        lease = work.leases[0]
        if lease.step.validates and lease.span.stop > 4:
            return [ev.Unreadable(work.node, lease.id, {4: "it is torn"})]
        return run.answer(work)

    run.node = respond
    run.join("a")
    run.run()
    assert (
        only(ev.Conclude, run.effects)[0].failure
        == "batch 4 of the validation set cannot be read: it is torn"
    )
    assert run.core.view.progress.steps == 4


def test_without_nodes_the_coordinator_measures_after_a_while() -> None:
    run = driver()
    run.join("a")
    run.run(lambda: is_validating(run))
    run.works.clear()
    run.feed(ev.Left("a", "connection reset"))
    left_at = run.now
    run.run(lambda: bool(only(ev.Evaluate, run.effects)))
    assert only(ev.Evaluate, run.effects) == [ev.Evaluate(2)]
    assert ALONE_SECONDS <= run.now - left_at < ALONE_SECONDS + 2
    # What the node had measured is not needed, and nothing is measured twice.
    run.join("b")
    run.run()
    assert [each.step for each in only(ev.Conclude, run.effects)] == [4]


def test_without_nodes_a_run_that_is_to_stop_does_not_wait() -> None:
    run = driver()
    run.join("a")
    run.run(lambda: is_validating(run))
    run.works.clear()
    run.feed(ev.Left("a", "connection reset"), ev.Stop("enough"))
    run.work()
    assert only(ev.Evaluate, run.effects) == [ev.Evaluate(2)]
    assert run.finish is not None
    assert run.finish.reason == "enough"


def test_what_a_cheat_measured_is_measured_again_by_others() -> None:
    run = driver(verify=1.0)
    told: list[ev.Assign] = []

    def respond(work: ev.Assign) -> list[ev.Event]:
        found = run.answer(work)
        if work.node == "liar" and work.leases[0].step.validates:
            told.append(work)
        # It is honest at first.
        is_lie = bool(told) and told[-1] is work and len(told) == 2
        verdicts = [ev.Verified(work.node, lease.id, "a lie" if is_lie else "") for lease in work.leases]
        return [*found, *verdicts]

    run.node = respond
    run.join("liar", "honest")
    run.run()
    assert [each.node for each in only(ev.Ban, run.effects)] == ["liar"]
    first = only(ev.Conclude, run.effects)[0]
    assert not first.failure
    before = run.effects[: run.effects.index(first)]
    again = before[before.index(only(ev.Ban, before)[0]) :]
    kept = {batch for each in only(ev.KeepMeasures, again) for batch in range(*each.lease.span)}
    assert kept == set(range(len(SIZES)))
    assert {each.lease.node for each in only(ev.KeepMeasures, again)} == {"honest"}


def test_a_lease_of_a_validation_is_short() -> None:
    run = driver(sizes=(1,) * 500)
    run.batch_seconds = 0.001
    run.join("a", "b")
    run.run()
    kept = only(ev.KeepMeasures, run.effects)
    assert max(each.lease.span.count for each in kept) == LEASE_BATCHES_MAX


def test_a_run_that_is_resumed_makes_up_for_a_validation_that_was_under_way() -> None:
    run = driver()
    run.join("a", "b")
    run.run(lambda: is_validating(run))
    cut = run.core.view.cut(run.now)
    plan = Plan(step_batches=2, epoch_limit=None, step_limit=4, samples=8, batch_size=1)
    settings = CoreSettings("sync", evaluates=True, evaluate_every=2, validation_sizes=SIZES, incarnation=1)
    again = Driver(plan, settings, cut)
    again.join("c")
    again.run()
    assert [each.step for each in only(ev.Conclude, again.effects)] == [2, 4]
    assert again.core.view.progress.samples == 8
