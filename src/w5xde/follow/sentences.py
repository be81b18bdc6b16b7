"""Four questions about a run, each answered in one sentence by the newest rows of its metrics.

Is it learning? Is it fast, and if not, why, and which flag helps? Who helps? Is anything lost? Terminal, page
and notebook show the same sentences. Pure functions: they read no file and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from w5xde.cli.units import duration_text, number_text
from w5xde.follow.history import NodeSpan, RunHistory
from w5xde.follow.rows import MetricsRow, NodeRow

# A sentence that something is wrong, that it could be better, or that all is well.
Tone = Literal["bad", "warn", "ok"]

CHANGES_RESULT = "changes the result"
CHANGES_BITS = "changes the bits"

# A change of the mean loss by less is no change, and a rise by more is a rise.
FLAT_SHARE, RISE_SHARE = 0.01, 0.05
# Limits of the sentence about speed, each a share of a core or of the time.
COORDINATOR_BUSY, DATA_BEHIND, NETWORK, WAITING, ON_CORE, STEPS_ENDED = 0.9, 0.2, 0.3, 0.3, 0.6, 0.3
# With fewer steps, the node that ended each of them says little.
STEPS_MIN = 20
# Work is at risk if it is not durable after this many intervals of checkpoints.
LATE_CHECKPOINTS = 2
LESS_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "rmse")


@dataclass(frozen=True, slots=True)
class Sentence:
    """An answer, and whether it is good news."""

    text: str
    tone: Tone = "ok"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the sentences need to know of a run besides its rows."""

    batches_per_step: int = 1
    loader_workers: int = 0
    # Seconds between checkpoints; None if they go by steps, or are off.
    checkpoint_seconds: float | None = 30.0
    join_line: str = "w5xde join TICKET"
    # The run is over, or its coordinator is gone.
    is_over: bool = False
    # What the ledger says of losses and of batches that were set aside, in sentences.
    trouble: Sequence[str] = ()


def answers(history: RunHistory, facts: RunFacts) -> list[Sentence]:
    """The answers to the four questions, in their order."""
    return [learning(history, facts), speed(history, facts), helpers(history, facts), safety(history, facts)]


# --- is it learning? ------------------------------------------------------------------------------


def learning(history: RunHistory, facts: RunFacts) -> Sentence:
    """Compare the mean loss of the newest tenth of the rows with that of the tenth before."""
    last = history.last
    if last is None or not last.step:
        return Sentence("It has made no step." if facts.is_over else "No step is made yet.")
    rows = [row for row in history.rows if row.loss is not None]
    if last.loss is None or not rows:
        since = rows[-1].step if rows else 0
        return Sentence(f"No: the loss is not a number after step {since:,}.", "bad")
    begin, now = _first_loss(rows), last.loss
    course = f"loss {number(begin)} → {number(now)}"
    count = max(1, len(rows) // 10)
    if len(rows) < 4:
        return Sentence(f"It begins: {course}{_evaluated(history)}.")
    newest, before = rows[-count:], rows[-2 * count : -count]
    change = (_mean_loss(newest) - _mean_loss(before)) / (abs(_mean_loss(before)) or 1.0)
    if facts.is_over:
        word = "Yes" if now < begin else "No"
        return Sentence(f"{word}: {course}{_evaluated(history)}.", "ok" if now < begin else "warn")
    if change > RISE_SHARE:
        return Sentence(f"No: {course}, rising since step {before[0].step:,}{_evaluated(history)}.", "bad")
    if change > -FLAT_SHARE:
        since = _flat_since(rows, _mean_loss(newest))
        return Sentence(f"Hardly: {course}, flat since step {since:,}{_evaluated(history)}.", "warn")
    minutes = max(newest[-1].seconds - before[0].seconds, 1e-9) / 2 / 60
    pace = _pace(-change / minutes)
    return Sentence(f"Yes: {course}, falling {pace}{_evaluated(history)}.")


def _first_loss(rows: list[MetricsRow]) -> float:
    return rows[0].loss_max if rows[0].loss_max is not None else rows[0].loss or 0.0


def _mean_loss(rows: list[MetricsRow]) -> float:
    return sum(row.loss or 0.0 for row in rows) / len(rows)


def _flat_since(rows: list[MetricsRow], level: float) -> int:
    """The first step since which the loss has not been far from this level."""
    near = 2 * RISE_SHARE * abs(level)
    since = rows[-1].step
    for row in reversed(rows):
        if abs((row.loss or 0.0) - level) > near:
            break
        since = row.step
    return since


def _pace(share_a_minute: float) -> str:
    return f"{share_a_minute:.0%} a minute" if share_a_minute < 1 else "fast"


def _evaluated(history: RunHistory) -> str:
    """The newest evaluation, with its step, and whether it is the best so far."""
    last = history.last
    if last is None or not last.evaluation:
        return ""
    name, value = next(iter(last.evaluation.items()))
    if value is None:
        return f"; {name} is not a number (step {last.evaluation_step or 0:,})"
    seen = [row.evaluation.get(name) for row in history.rows]
    known = [each for each in seen if each is not None]
    lower = any(word in name.lower() for word in LESS_IS_BETTER)
    is_best = len(set(known)) > 1 and value == (min(known) if lower else max(known))
    best = "best so far, " if is_best else ""
    shown = f"{value:.1%}" if "accuracy" in name.lower() and 0 <= value <= 1 else number(value)
    return f"; {name} {shown} ({best}step {last.evaluation_step or 0:,})"


# --- is it fast? ----------------------------------------------------------------------------------


def speed(history: RunHistory, facts: RunFacts) -> Sentence:
    """Name what limits the speed over the last seconds, and the flag that helps: the first that holds."""
    last, spans = history.last, history.spans()
    if facts.is_over:
        return _overall_speed(last)
    if last is None or not spans:
        if last is not None and last.node_states.get("working"):
            return Sentence(f"{_rate(last)}.")
        return Sentence(f"No node helps yet. On another machine: {facts.join_line}", "warn")
    rate, recent = _rate(last), history.recent
    load = sum(row.load for row in recent) / len(recent)
    if load > COORDINATOR_BUSY:
        return Sentence(
            f"{rate}. The coordinator is the limit ({load:.0%} of a core) → larger --batch-size"
            f" ({CHANGES_RESULT}).",
            "warn",
        )
    if sum(row.data_behind for row in recent) / len(recent) > DATA_BEHIND:
        workers = max(2, 2 * facts.loader_workers)
        return Sentence(f"{rate}. Reading data is the limit → --loader-workers {workers}.", "warn")
    slow_link = max(spans, key=lambda span: span.network / span.seconds)
    if (share := slow_link.network / slow_link.seconds) > NETWORK:
        return Sentence(
            f"{rate}. {slow_link.name}'s link{_link(slow_link.last)} takes {min(share, 1):.0%} of its time →"
            f" --compress auto:lossy ({CHANGES_BITS}), or --mode rounds ({CHANGES_RESULT}).",
            "warn",
        )
    limit = _limit_of_nodes(history, spans, facts)
    if limit:
        return Sentence(f"{rate}. {limit}", "warn")
    computing = sum(span.busy for span in spans) / sum(span.seconds for span in spans)
    best = max(spans, key=lambda span: span.samples)
    adds = best.samples / max(history.recent_seconds, 1e-9)
    advice = f": one more like {best.name} adds about {adds:,.0f} samples/s" if adds >= 1 else ""
    return Sentence(f"{rate}. Nodes compute {computing:.0%} of the time{advice}.")


def _limit_of_nodes(history: RunHistory, spans: list[NodeSpan], facts: RunFacts) -> str:
    """Why nodes compute less than they could, and the flag that helps; empty if they do not."""
    wait = sum(span.wait for span in spans) / sum(span.seconds for span in spans)
    at_once = history.recent[-1].parallel or len(spans)
    if wait > WAITING and facts.batches_per_step < 2 * at_once and at_once > 1:
        more = 2
        while more < 2 * at_once:
            more *= 2
        return (
            f"Steps are too small for {len(spans)} nodes, which wait {wait:.0%} of their time →"
            f" --batches-per-step {more} ({CHANGES_RESULT})."
        )
    for span in spans:
        if span.busy > 0.5 and span.on_core / span.busy < ON_CORE:
            return f"{span.name} shares its cores with other programs, or with too many nodes."
    ended = {span.name: span.last.steps_ended - span.first.steps_ended for span in spans}
    steps = history.recent[-1].step - history.recent[0].step
    last_one = max(ended, key=ended.__getitem__)
    fair = 1.5 / len(spans)
    if len(spans) > 1 and steps >= STEPS_MIN and ended[last_one] / steps > max(STEPS_ENDED, fair):
        return f"All nodes wait for {last_one} at the end of {ended[last_one] / steps:.0%} of the steps."
    return ""


def _overall_speed(last: MetricsRow | None) -> Sentence:
    if last is None or not last.seconds:
        return Sentence("It has computed nothing.")
    return Sentence(f"{last.samples / last.seconds:,.0f} samples/s over {duration_text(last.seconds)}.")


def _rate(row: MetricsRow) -> str:
    return f"{row.samples_per_second:,.0f} samples/s"


def _link(node: NodeRow) -> str:
    known = [each for each in (node.link_down, node.link_up) if each]
    return f" ({min(known) / 1e6:.3g} MB/s)" if known else ""


# --- who helps? -----------------------------------------------------------------------------------


def helpers(history: RunHistory, facts: RunFacts) -> Sentence:
    """Count nodes by their states, and name the ones to look at."""
    last = history.last
    states = dict(last.node_states) if last is not None else {}
    working, gone = states.get("working", 0), states.get("gone", 0)
    faulty = [name for name, node in history.nodes.items() if node.faults]
    more = f"; {_names(faulty)} sent bad updates" if faulty else ""
    if facts.is_over:
        return Sentence(f"{number_text(working + gone, 'node')} helped{more}.", "warn" if faulty else "ok")
    if not working:
        left = f"; {gone} left" if gone else ""
        return Sentence(f"Nobody{left}{more}. On another machine: {facts.join_line}", "warn")
    slow = _slow_nodes(history.spans())
    parts = [f"{working} {'works' if working == 1 else 'work'}"]
    if slow:
        parts.append(f"{_names(slow)} {'is' if len(slow) == 1 else 'are'} slow")
    if gone:
        parts.append(f"{gone} left")
    return Sentence(f"{', '.join(parts)}{more}.", "warn" if slow or faulty else "ok")


def _slow_nodes(spans: list[NodeSpan]) -> list[str]:
    """Nodes that computed less than a quarter of what the median did."""
    done = sorted(span.samples for span in spans)
    median = done[len(done) // 2] if done else 0
    return [span.name for span in spans if 4 * span.samples < median]


# --- is anything lost? ----------------------------------------------------------------------------


def safety(history: RunHistory, facts: RunFacts) -> Sentence:
    """Say what is applied, what would survive a crash, and what is missing."""
    last = history.last
    if last is None:
        return Sentence("Nothing: there is nothing yet.")
    relent = f"; {number_text(last.batches_relent, 'batch')} lent again" if last.batches_relent else ""
    if facts.trouble:
        return Sentence(f"Yes: {'; '.join(facts.trouble)}.", "bad")
    if last.batches_aside:
        return Sentence(
            f"{number_text(last.batches_aside, 'batch')} set aside, which count in no step{relent}.", "bad"
        )
    steps = f"{number_text(last.step, 'step')}, 0 lost, 0 applied twice"
    if facts.is_over:
        return Sentence(f"Nothing: {steps}; {last.durable_steps:,} are on disk{relent}.")
    age = max(0.0, last.time - last.durable_at) if last.durable_at else 0.0
    every = facts.checkpoint_seconds
    if every is not None and last.step > last.durable_steps and age > LATE_CHECKPOINTS * every:
        return Sentence(f"At risk: {duration_text(age)} of work are not on disk; {steps}{relent}.", "warn")
    if not last.durable_steps:
        return Sentence(f"Nothing: {steps}; no checkpoint is written yet{relent}.")
    return Sentence(
        f"Nothing: {steps}; {last.durable_steps:,} survive a crash ({duration_text(age)} ago){relent}."
    )


# --- words ----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A number with three digits that say something."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _names(names: Iterable[str]) -> str:
    known = list(names)
    shown = ", ".join(known[:3])
    return shown if len(known) <= 3 else f"{shown} and {len(known) - 3} more"
