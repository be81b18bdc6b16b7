"""The audit: an honest ledger, told by the real core, is clean; and every lie in one is found."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.control.honest import EPOCHS, HONEST, SAMPLES, SIZE, STEPS, Story, two_lives
from tests.security.measure import MIB, peak_bytes
from w5xde.control import events as ev
from w5xde.control.audit.auditor import Auditor, Findings
from w5xde.control.ledger_records import Record
from w5xde.control.steps.leases import INCARNATION_SHIFT

Records = list[Record]


def audited(records: Records) -> Findings:
    auditor = Auditor()
    for record in records:
        auditor.read(record)
    return auditor.close()


# --- honest runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", HONEST)
def test_an_honest_ledger_is_clean_and_adds_up(case: str) -> None:
    story = HONEST[case]()
    found = audited(story.records)
    assert found.violations == []
    aside = int("aside" in case)
    assert (found.steps, found.epochs) == (STEPS - ("whole step" in case), EPOCHS)
    assert (found.batches, found.samples) == (2 * 7 - aside, 2 * SAMPLES - aside * SIZE)
    assert found.ended == "all steps done"
    assert sum(node.batches for node in found.nodes.values()) == found.batches
    assert len(found.aside) == aside


def test_what_was_lost_and_redone_is_counted() -> None:
    assert audited(two_lives().records).steps_redone == 1
    assert audited(HONEST["killed in every life"]().records).steps_redone == 2
    assert audited(HONEST["killed in every life"]().records).crashes == 3
    assert audited(HONEST["replayed"]().records).steps_redone == 0


def test_a_batch_set_aside_ends_the_run_and_is_tried_again_when_it_is_resumed() -> None:
    story = Story(poison=4).live("a", "b")
    assert "batch 4 failed wherever" in audited(story.records).ended
    assert audited(story.records).violations == []
    assert audited(story.records).epochs == 0
    # Its data is repaired before the run is resumed.
    story.poison, view = None, story.life.core.view
    story.cuts[view.version] = view.cut(0.0)
    found = audited(story.live("a", version=view.version).records)
    assert found.violations == []
    assert (found.batches, found.epochs, found.aside) == (14, 2, [])
    assert found.steps == STEPS + 1


def test_evaluations_may_be_of_any_step_that_was_made_and_old_ones_do_not_say_of_which() -> None:
    records = Story().live("a", "b").records
    for step, place in enumerate(places(records, "step")):
        found = {"kind": "evaluated", "text": "", "step": step + 1, "epoch": 0, "metrics": {"loss": 1.0}}
        records.insert(place + 1 + step, found)
    records.insert(1, {"kind": "evaluated", "text": "evaluation: loss 1", "metrics": {"loss": 1.0}})
    assert audited(records).violations == []


def test_a_node_that_goes_in_the_middle_is_no_violation() -> None:
    story = Story().live("a", "b", steps=2)
    story.life.feed(ev.Left("a", "gone"))
    found = audited(story.records + story.life.scribe.drain())
    assert found.violations == []
    assert found.nodes["a"].expired > 0


def test_damaged_checkpoints_are_a_remark_and_their_steps_are_redone() -> None:
    records = Story().live("a", "b", steps=5).live("b", version=2).records
    restore = next(record for record in records if record["kind"] == "restore")
    assert any("durable steps were lost" in each for each in audited(records).violations)
    restore["damaged"] = ["step-000000004: its sha256 differs"]
    found = audited(records)
    assert found.violations == []
    assert "step-000000004" in found.remarks[0]
    assert found.steps_redone == 3


# --- lies -----------------------------------------------------------------------------------------


def places(records: Records, kind: str) -> list[int]:
    return [at for at, record in enumerate(records) if record["kind"] == kind]


def nth(records: Records, kind: str, number: int = 0) -> Record:
    return records[places(records, kind)[number]]


def renumbered(records: Records) -> None:
    """Make the versions look right, as somebody clever would."""
    for version, at in enumerate(places(records, "step")):
        records[at]["version"] = version


def twice(records: Records) -> None:
    at = places(records, "step")[1]
    records.insert(at + 1, copy.deepcopy(records[at]))


def twice_and_renumbered(records: Records) -> None:
    twice(records)
    renumbered(records)


def lost(records: Records) -> None:
    del records[places(records, "step")[1]]


def lost_and_renumbered(records: Records) -> None:
    lost(records)
    renumbered(records)


def lost_in_a_step(records: Records) -> None:
    step = next(each for each in records if each["kind"] == "step" and len(each["shares"]) > 1)
    step["shares"] = step["shares"][1:]


def early(records: Records) -> None:
    epoch = records.pop(places(records, "epoch")[0])
    records.insert(places(records, "step")[1], epoch)


def foreign(records: Records) -> None:
    start, stop, node, _ = nth(records, "step", 1)["shares"][0]
    other = nth(records, "step", 0)["shares"][0][3]
    nth(records, "step", 1)["shares"][0] = (start, stop, node, other)


def by_another(records: Records) -> None:
    *batches, node, lease = nth(records, "step")["shares"][0]
    nth(records, "step")["shares"][0] = (*batches, "b" if node == "a" else "a", lease)


def settled_twice(records: Records) -> None:
    *_, node, lease = nth(records, "step")["shares"][0]
    records.insert(places(records, "step")[0] + 1, {"kind": "took", "node": node, "leases": [lease]})


def expired_after_its_answer(records: Records) -> None:
    *_, node, lease = nth(records, "step")["shares"][0]
    records.insert(places(records, "step")[0] + 1, {"kind": "expired", "node": node, "leases": [lease]})


def taken_after_it_expired(records: Records) -> None:
    *_, node, lease = nth(records, "step")["shares"][0]
    lent = next(
        at for at, each in enumerate(records) if each["kind"] == "lend" and each["leases"][0][0] == lease
    )
    records.insert(lent + 1, {"kind": "expired", "node": node, "leases": [lease]})


def old_life(records: Records) -> None:
    """The second life uses leases of the first."""
    for record in records[places(records, "start")[1] :]:
        if record["kind"] == "lend":
            record["leases"] = [
                [lease - (1 << INCARNATION_SHIFT), *rest] for lease, *rest in record["leases"]
            ]
        if record["kind"] == "step":
            record["shares"] = [
                (*rest, lease - (1 << INCARNATION_SHIFT)) for *rest, lease in record["shares"]
            ]


def same_lease(records: Records) -> None:
    first, second = (records[at] for at in places(records, "lend")[:2])
    second["leases"][0][0] = first["leases"][0][0]


def absent(records: Records) -> None:
    del records[places(records, "joined")[0]]


def gone(records: Records) -> None:
    records.insert(places(records, "step")[0], {"kind": "left", "node": "a", "text": "", "batches": 0})


def durable_step_lost(records: Records) -> None:
    nth(records, "restore")["version"] = 2


def too_many(records: Records) -> None:
    nth(records, "checkpoint", 1)["version"] = 5


def restored_too_many(records: Records) -> None:
    nth(records, "restore")["version"] = 6


def another_hash(records: Records) -> None:
    nth(records, "restore")["sha256"] = "of something else"


def written_differently(records: Records) -> None:
    at = places(records, "checkpoint")[-1]
    records.insert(at + 1, records[at] | {"sha256": "of something else"})


def swapped(records: Records) -> None:
    step = next(each for each in records if each["kind"] == "step" and len(each["shares"]) > 1)
    (start, stop, *one), (begin, end, *other) = step["shares"][:2]
    step["shares"][:2] = [(start, stop, *other), (begin, end, *one)]


def another_size(records: Records) -> None:
    nth(records, "step")["sizes"] = [[3, 1], [2, 2]]


def shorter(records: Records) -> None:
    nth(records, "step", 1)["ends_epoch"] = True


def same_life(records: Records) -> None:
    nth(records, "start", 1)["incarnation"] = 1


def another_plan(records: Records) -> None:
    nth(records, "start", 1)["plan"]["batch_size"] = 7


def nothing_restored(records: Records) -> None:
    del records[places(records, "restore")[0]]


def headless(records: Records) -> None:
    del records[0]


def completed_twice(records: Records) -> None:
    at = places(records, "epoch")[0]
    records.insert(at + 1, copy.deepcopy(records[at]))


def left_out(records: Records) -> None:
    """An epoch complete without a batch that nobody ever set aside."""
    lost_and_renumbered(records)
    nth(records, "epoch")["aside"] = [3, 4, 5]


def set_aside_and_counted(records: Records) -> None:
    aside = {"kind": "aside", "step": 0, "epoch": 0, "batch": 1, "samples": 2, "reason": "", "nodes": []}
    records.insert(places(records, "step")[0], aside)


def never_tried(records: Records) -> None:
    """A batch of the second epoch goes missing, as if it had been set aside in the life before."""
    step = nth(records, "step", -1)
    first, last = step["shares"][-1][:2]
    batches = [step["first"] + i for i in range(first, last)]
    del step["shares"][-1]
    for kind in ("restore", "resumed"):
        nth(records, kind)["aside"] = [(1, batch) for batch in batches]
    nth(records, "epoch", -1)["aside"] = batches


def measured_too_early(records: Records) -> None:
    found = {"kind": "evaluated", "text": "", "step": 2, "epoch": 0, "metrics": {"loss": 1.0}}
    records.insert(places(records, "step")[0] + 1, found)


def gap(records: Records) -> None:
    records.insert(5, {"kind": "gap", "records": 100})


LIES: dict[Callable[[Records], None], str] = {
    twice: "applies a step to version 1, but 2 are recorded",
    twice_and_renumbered: "applies batch 3 of epoch 1 again",
    lost: "applies a step to version 2, but 1 are recorded",
    lost_and_renumbered: r"calls epoch 1 complete, but batches \[3, 4, 5\] never counted",
    lost_in_a_step: "of a step of 3",
    early: "calls epoch 1 complete, but batches .* never counted",
    foreign: "who was not lent them",
    by_another: "who was not lent them|not outstanding there",
    settled_twice: "accepts an answer of . to lease .* which is not outstanding",
    expired_after_its_answer: "ends lease .* which is not outstanding",
    taken_after_it_expired: "which is not outstanding",
    old_life: "in the wrong life",
    same_lease: "gives lease .* twice",
    absent: "lends to a, who is not there",
    gone: "lends to a, who is not there",
    durable_step_lost: "durable steps were lost",
    too_many: "calls version 5 durable, but only",
    restored_too_many: "restores version 6, but only 5 steps are recorded",
    another_hash: "restores another checkpoint of version 4",
    written_differently: "again, and differently",
    swapped: "who was not lent them",
    another_size: "where .* were planned",
    shorter: "before its last batch",
    same_life: "starts life 1 after life 1",
    another_plan: "goes on by another plan",
    nothing_restored: "works without having restored anything",
    headless: "comes before any start",
    completed_twice: "calls epoch 1 complete again",
    left_out: "calls epoch 1 complete, but batches",
    set_aside_and_counted: r"with \[1\] set aside",
    never_tried: "which never were",
    measured_too_early: "measures the model of step 2, but only 1 steps are recorded",
    gap: "tells of a gap",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_every_lie_is_found(lie: Callable[[Records], None]) -> None:
    records = copy.deepcopy(two_lives().records)
    assert audited(records).violations == []
    lie(records)
    found = audited(records).violations
    assert any(re.search(LIES[lie], each) for each in found), found


@pytest.mark.parametrize(
    "lie", [lie for lie in LIES if lie not in (lost_in_a_step, swapped)], ids=lambda lie: lie.__name__
)
def test_every_lie_is_found_in_an_async_run(lie: Callable[[Records], None]) -> None:
    """There one node gives a whole step, so that nothing can be taken out of it or swapped."""
    records = copy.deepcopy(two_lives("async").records)
    lie(records)
    assert audited(records).violations


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_record_that_matters_can_be_taken_out(mode: str) -> None:
    whole, killed = Story(mode).live("a", "b").records, two_lives(mode).records
    for records, kinds in ((whole, ("start", "lend", "step")), (killed, ("start", "restore"))):
        for at, record in enumerate(records):
            if record["kind"] in kinds:
                assert audited(records[:at] + records[at + 1 :]).violations, record


NONSENSE: list[Any] = [None, True, -1, 0, 10**6, 0.5, math.nan, "x", [], [[]], [[1, 2, 3, 4]], {}, {"a": []}]


def test_nonsense_is_a_violation_or_harmless_but_never_an_exception() -> None:
    records = HONEST["aside with skip, restored"]().records
    # Each record that is read, with each of its values replaced or taken out.
    for at in {record["kind"]: at for at, record in reversed(list(enumerate(records)))}.values():
        for key in records[at]:
            without = {name: value for name, value in records[at].items() if name != key}
            for other in [without, *(records[at] | {key: value} for value in NONSENSE)]:
                audited([*records[:at], other, *records[at + 1 :]])


HUGE = 10**12


def huge_sizes(records: Records) -> None:
    nth(records, "step")["sizes"] = [[2, HUGE]]


def huge_share(records: Records) -> None:
    start, _, *rest = nth(records, "step")["shares"][0]
    nth(records, "step")["shares"][0] = (start, HUGE, *rest)


def share_before_its_step(records: Records) -> None:
    _, stop, *rest = nth(records, "step")["shares"][0]
    nth(records, "step")["shares"][0] = (-HUGE, stop, *rest)


def huge_plan(records: Records) -> None:
    for at in places(records, "start"):
        records[at]["plan"]["samples"] = HUGE


def huge_steps_and_plan(records: Records) -> None:
    for at in places(records, "start"):
        records[at]["plan"]["step_batches"] = HUGE
    huge_sizes(records)


def huge_epoch(records: Records) -> None:
    nth(records, "step", -1)["epoch"] = HUGE


def huge_place(records: Records) -> None:
    nth(records, "step", -1)["first"] = HUGE


def far_aside(records: Records) -> None:
    aside = {"kind": "aside", "step": 0, "epoch": 0, "batch": HUGE, "samples": 2, "reason": "", "nodes": []}
    records.insert(places(records, "step")[-1], aside | {"epoch_batches": HUGE + 1})


def no_batch_size(records: Records) -> None:
    for at in places(records, "start"):
        records[at]["plan"]["batch_size"] = 0


def restored_before_all(records: Records) -> None:
    nth(records, "restore")["version"] = -2


def many_steps_of_many(records: Records) -> None:
    """Each line is short, and tells of as many batches as a step may have."""
    for at in places(records, "start"):
        records[at]["plan"] |= {"step_batches": 65536, "samples": None}
    step = {"kind": "step", "replayed": True, "epoch": 0, "sizes": [[2, 65536]], "aside": []}
    step |= {"ends_epoch": False, "shares": [[0, 65536, "a", 1]], "step": 0}
    begin = len(places(records, "step"))
    records += [step | {"version": begin + i, "first": HUGE + 65536 * i} for i in range(2000)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "lie",
    [
        huge_sizes,
        huge_share,
        share_before_its_step,
        huge_plan,
        huge_steps_and_plan,
        huge_epoch,
        huge_place,
        far_aside,
        no_batch_size,
        restored_before_all,
        many_steps_of_many,
    ],
    ids=lambda lie: lie.__name__,
)
def test_a_huge_number_is_a_violation_and_costs_nothing(lie: Callable[[Records], None], stream: bool) -> None:
    records = copy.deepcopy(Story(stream=stream).live("a", "b", steps=5).live("b", version=4).records)
    is_harmless = stream and lie is huge_plan
    lie(records)
    found: list[Findings] = []
    peak = peak_bytes(lambda: found.append(audited(records)))
    assert found[0].violations or is_harmless
    # What was read, a few times; a sentence for each wrong record.
    assert peak < 4 * MIB
    assert all(len(each) < 2000 for each in found[0].violations)


@pytest.mark.parametrize("record", [each for each in NONSENSE if not isinstance(each, dict)])
def test_a_record_that_is_no_record_is_a_violation(record: Any) -> None:
    records = two_lives().records
    assert audited([*records[:3], record, *records[3:]]).violations


def test_an_empty_ledger_proves_nothing() -> None:
    assert audited([]).violations == ["the ledger is empty"]


@pytest.mark.parametrize("apart", [False, True])
def test_a_restore_in_the_middle_of_a_stretch_is_found_out(apart: bool) -> None:
    lease = (1 << INCARNATION_SHIFT) + 1
    plan = {"step_batches": 1, "batch_size": 1, "samples": 4, "mode": "async"}
    records: Records = [
        {"kind": "start", "incarnation": 1, "plan": plan},
        {"kind": "joined", "node": "a"},
        {"kind": "lend", "node": "a", "version": 0, "leases": [[lease, 0, 0, 4]]},
    ]
    place = {"kind": "step", "apart": True, "step": 0, "version": 0, "epoch": 0, "first": 0}
    records.append(place | {"sizes": [[1, 4]], "ends_epoch": True, "shares": [[0, 4, "a", lease]]})
    if not apart:
        records[2:] = [
            record
            for i in range(4)
            for record in (
                {"kind": "lend", "node": "a", "version": i, "leases": [[lease + i, i, 0, 1]]},
                {"kind": "step", "step": i, "version": i, "epoch": 0, "first": i, "sizes": [[1, 1]]}
                | {"ends_epoch": i == 3, "shares": [[0, 1, "a", lease + i]]},
            )
        ]
    assert audited(records).violations == []
    assert (audited(records).steps, audited(records).batches) == (4, 4)
    records += [
        {"kind": "start", "incarnation": 2, "plan": plan},
        {"kind": "restore", "version": 1, "sha256": "x", "aside": [], "damaged": []},
        {"kind": "epoch", "epoch": 1, "aside": []},
    ]
    assert any("never counted" in each or "never applied" in each for each in audited(records).violations)
