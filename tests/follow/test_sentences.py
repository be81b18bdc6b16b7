"""Each answer about a run, by rows with fixed numbers."""

from __future__ import annotations

from typing import Any

import pytest

from w5xde.follow.history import RECENT_SECONDS, ROWS_MAX, RunHistory
from w5xde.follow.rows import MetricsRow, NodeRow, read_row
from w5xde.follow.sentences import RunFacts, Sentence, answers, helpers, learning, safety, speed

LIVE, OVER = RunFacts(batches_per_step=8), RunFacts(is_over=True)


def node(at: float, **changes: Any) -> NodeRow:
    """A node that has computed nine tenths of its time so far."""
    facts: dict[str, Any] = {
        "busy_seconds": 0.9 * at,
        "on_core_seconds": 0.9 * at,
        "wait_seconds": 0.1 * at,
        "samples": int(300 * at),
    }
    return NodeRow(**facts | {key: value(at) if callable(value) else value for key, value in changes.items()})


def run_of(
    losses: list[float | None], nodes: dict[str, dict[str, Any]] | None = None, **changes: Any
) -> RunHistory:
    """A history with a row a second, and two nodes unless others are given."""
    history = RunHistory()
    for at, loss in enumerate(losses):
        facts = {name: node(at, **each) for name, each in (nodes or {"a": {}, "b": {}}).items()}
        fixed: dict[str, Any] = {
            "time": 1000.0 + at,
            "life": 1,
            "seconds": float(at),
            "step": 10 * (at + 1),
            "durable_steps": 10 * at,
            "durable_at": 1000.0 + at,
            "loss": loss,
            "samples": 600 * at,
            "samples_per_second": 600.0,
            "node_states": {"working": len(facts)},
            "node_facts": facts,
        }
        history.add(MetricsRow(**fixed | changes))
    return history


FALLING = [2.0 * 0.9**at for at in range(30)]


# --- is it learning? ------------------------------------------------------------------------------


def test_a_falling_loss_is_learning_with_its_pace_and_its_evaluation() -> None:
    history = run_of(list(FALLING), evaluation={"accuracy": 0.9}, evaluation_step=100)
    history.add(
        MetricsRow(
            time=1030,
            life=1,
            seconds=30,
            step=310,
            loss=0.08,
            evaluation={"accuracy": 0.964},
            evaluation_step=300,
        )
    )
    said = learning(history, LIVE)
    assert said == Sentence("Yes: loss 2 → 0.08, falling fast; accuracy 96.4% (best so far, step 300).")


def test_a_loss_that_stays_is_flat_since_a_step() -> None:
    said = learning(run_of([*FALLING, *[0.1] * 60]), LIVE)
    assert said == Sentence("Hardly: loss 2 → 0.1, flat since step 290.", "warn")


def test_a_rising_loss_is_not_learning() -> None:
    said = learning(run_of([0.5 + 0.02 * at for at in range(40)]), LIVE)
    assert said == Sentence("No: loss 0.5 → 1.28, rising since step 330.", "bad")


def test_a_loss_that_is_no_number_names_the_last_step_that_had_one() -> None:
    said = learning(run_of([1.0, 0.9, 0.8, None]), LIVE)
    assert said == Sentence("No: the loss is not a number after step 30.", "bad")


def test_a_run_that_is_over_says_what_it_learned() -> None:
    assert learning(run_of(list(FALLING)), OVER).text == "Yes: loss 2 → 0.0942."
    assert learning(RunHistory(), OVER).text == "It has made no step."


def test_a_metric_that_is_an_error_is_best_when_it_is_smallest() -> None:
    history = run_of([1.0, 0.9, 0.8], evaluation={"val_loss": 2.5}, evaluation_step=5)
    history.add(
        MetricsRow(time=1003, life=1, step=40, loss=0.7, evaluation={"val_loss": 2.0}, evaluation_step=9)
    )
    assert "val_loss 2 (best so far, step 9)" in learning(history, LIVE).text


# --- is it fast? ----------------------------------------------------------------------------------


def test_without_nodes_it_says_how_to_join() -> None:
    assert speed(RunHistory(), LIVE) == Sentence(
        "No node helps yet. On another machine: w5xde join TICKET", "warn"
    )


@pytest.mark.parametrize(
    ("nodes", "changes", "facts", "text"),
    [
        (
            None,
            {"load": 0.97},
            LIVE,
            "The coordinator is the limit (97% of a core) → larger --batch-size (changes the result).",
        ),
        (None, {"data_behind": 0.5}, LIVE, "Reading data is the limit → --loader-workers 2."),
        (
            None,
            {"data_behind": 0.5},
            RunFacts(batches_per_step=8, loader_workers=4),
            "Reading data is the limit → --loader-workers 8.",
        ),
        (
            {"a": {}, "pi": {"network_seconds": lambda at: 0.63 * at, "link_up": 2_100_000}},
            {},
            LIVE,
            (
                "pi's link (2.1 MB/s) takes 63% of its time → --compress auto:lossy (changes the bits), or"
                " --mode rounds (changes the result)."
            ),
        ),
        (
            {
                name: {"busy_seconds": lambda at: 0.5 * at, "wait_seconds": lambda at: 0.5 * at}
                for name in "abcdef"
            },
            {},
            RunFacts(batches_per_step=2),
            (
                "Steps are too small for 6 nodes, which wait 50% of their time → --batches-per-step 16"
                " (changes the result)."
            ),
        ),
        (
            {"a": {}, "b": {"on_core_seconds": lambda at: 0.4 * at}},
            {},
            LIVE,
            "b shares its cores with other programs, or with too many nodes.",
        ),
        (
            {"a": {}, "b": {}, "c": {"steps_ended": lambda at: int(9 * at)}},
            {},
            LIVE,
            "All nodes wait for c at the end of 90% of the steps.",
        ),
        (
            {"a": {}, "gpu": {"samples": lambda at: int(3900 * at)}},
            {},
            LIVE,
            "Nodes compute 90% of the time: one more like gpu adds about 3,900 samples/s.",
        ),
    ],
)
def test_the_first_limit_that_holds_is_named_with_its_flag(
    nodes: dict[str, dict[str, Any]] | None, changes: dict[str, Any], facts: RunFacts, text: str
) -> None:
    assert speed(run_of(list(FALLING), nodes, **changes), facts).text == f"600 samples/s. {text}"


def test_nodes_that_take_turns_on_a_core_do_not_make_steps_too_small() -> None:
    waiting = {"busy_seconds": lambda at: 0.4 * at, "wait_seconds": lambda at: 0.6 * at}
    nodes: dict[str, dict[str, Any]] = {"a": dict(waiting), "b": dict(waiting), "c": dict(waiting)}
    assert "Steps are too small" in speed(run_of(list(FALLING), nodes), RunFacts(batches_per_step=4)).text
    said = speed(run_of(list(FALLING), nodes, parallel=2), RunFacts(batches_per_step=4))
    assert said.text.startswith("600 samples/s. Nodes compute 40% of the time")


def test_what_happened_long_ago_or_in_another_life_is_no_limit_now() -> None:
    history = run_of(list(FALLING), load=0.99)
    for at in range(30, 45):
        facts = {"a": node(at), "b": node(at)}
        history.add(MetricsRow(time=1000.0 + at, life=2, step=10 * at, loss=0.1, node_facts=facts))
    assert "limit" not in speed(history, LIVE).text
    assert history.recent_seconds <= RECENT_SECONDS


def test_a_run_that_is_over_says_its_speed_in_all() -> None:
    assert speed(run_of(list(FALLING)), OVER).text == "600 samples/s over 29.0 s."


# --- who helps? -----------------------------------------------------------------------------------


def test_nodes_are_counted_and_slow_or_faulty_ones_are_named() -> None:
    nodes = {"a": {}, "b": {}, "pi": {"samples": lambda at: int(10 * at)}, "odd": {"faults": 2}}
    history = run_of(list(FALLING), nodes, node_states={"working": 4, "gone": 1})
    assert helpers(history, LIVE) == Sentence("4 work, pi is slow, 1 left; odd sent bad updates.", "warn")
    assert helpers(run_of([1.0]), LIVE) == Sentence("2 work.")


def test_a_pool_without_nodes_asks_for_some() -> None:
    said = helpers(run_of([1.0], node_states={"gone": 2}), LIVE)
    assert said == Sentence("Nobody; 2 left. On another machine: w5xde join TICKET", "warn")


# --- is anything lost? ----------------------------------------------------------------------------


def test_nothing_is_lost_and_what_survives_a_crash_is_said() -> None:
    history = run_of(list(FALLING), durable_at=1017.0, batches_relent=3)
    assert safety(history, LIVE) == Sentence(
        "Nothing: 300 steps, 0 lost, 0 applied twice; 290 survive a crash (12.0 s ago); 3 batches lent again."
    )


def test_work_that_is_long_not_durable_is_at_risk() -> None:
    history = run_of(list(FALLING), durable_at=789.0)
    assert safety(history, LIVE) == Sentence(
        "At risk: 4:00 of work are not on disk; 300 steps, 0 lost, 0 applied twice.", "warn"
    )
    # Checkpoints that go by steps, or are off, have no time by which they are late.
    assert safety(history, RunFacts(checkpoint_seconds=None)).tone == "ok"


def test_batches_that_were_set_aside_and_trouble_of_the_ledger_are_named() -> None:
    assert safety(run_of([1.0], batches_aside=2), LIVE).text == "2 batches set aside, which count in no step."
    trouble = RunFacts(trouble=["the ledger has lost its end"])
    assert safety(run_of([1.0]), trouble) == Sentence("Yes: the ledger has lost its end.", "bad")


# --- rows and history -----------------------------------------------------------------------------


def test_a_history_stays_bounded_and_keeps_its_ends() -> None:
    history = RunHistory()
    for at in range(5 * ROWS_MAX):
        history.add(MetricsRow(time=float(at), life=1, step=at, loss=1.0))
    assert len(history.rows) <= ROWS_MAX
    assert (history.rows[0].step, history.rows[-1].step) == (0, 5 * ROWS_MAX - 1)
    gaps = [b.step - a.step for a, b in zip(history.rows, history.rows[1:], strict=False)]
    # Two strides: the newest row of each takes the place of those before it.
    assert max(gaps) <= 16


def test_rows_of_older_runs_are_read_and_torn_lines_are_not() -> None:
    old = read_row(
        b'{"seconds":1.0,"step":3,"loss":0.5,"nodes":{"a":3},"computing":{"a":0.9},"evaluation":{}}'
    )
    assert old is not None
    assert (old.step, old.life, old.node_facts) == (3, 0, {})
    assert read_row(b'{"seconds":1.0,"st') is None
    history = RunHistory()
    history.add(old)
    assert all(each.text for each in answers(history, LIVE))
