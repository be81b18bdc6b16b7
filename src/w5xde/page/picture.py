"""What the page is sent of a run, as plain values for JSON; the same for a live page and for a report.

Decides what is shown; the scripts decide how. Knows no HTTP.
"""

from __future__ import annotations

from typing import Any

import msgspec

import w5xde
from w5xde.cli.units import duration_text
from w5xde.follow.chart_points import COLUMNS, point_of
from w5xde.follow.rows import MetricsRow, NodeRow
from w5xde.follow.run_follower import RunFollower

QUESTIONS = ("Is it learning?", "Is it fast?", "Who helps?", "Is anything lost?")
# Facts of the manifest that say what the run is made of.
VERSIONS = ("w5xde", "torch", "python", "machine", "code_sha256")
# Figures of a result, in the order in which they are shown.
RESULT = (
    "weights_sha256",
    "weights_step",
    "seconds",
    "steps",
    "epochs",
    "batches",
    "samples",
    "batches_relent",
    "bytes_sent",
    "bytes_received",
)


def history(run: RunFollower) -> dict[str, Any]:
    """All points of the charts."""
    return {
        "columns": run.points.columns(),
        "evaluations": run.points.evaluations,
        "lives": run.points.lives,
    }


def point(row: MetricsRow) -> dict[str, Any]:
    """What one more row adds to the charts."""
    found: dict[str, Any] = {"point": point_of(row)}
    if row.evaluation and row.evaluation_step is not None:
        found["evaluation"] = [row.evaluation_step, row.evaluation]
    return found


def nodes(run: RunFollower, names: set[str] | None = None) -> dict[str, dict[str, Any]]:
    """The facts of nodes; of those with these names, if given."""
    shares = run.node_shares()
    return {
        name: _node(node) | {"shares": [round(share, 4) for share in shares[name]]}
        for name, node in run.history.nodes.items()
        if names is None or name in names
    }


def _node(node: NodeRow) -> dict[str, Any]:
    known: dict[str, Any] = msgspec.to_builtins(node)
    return known


def now(run: RunFollower, clock: float) -> dict[str, Any]:
    """What is true at this time of day: state, progress, sentences."""
    state, last, row_age = run.state(clock), run.history.last, run.row_age(clock)
    return {
        "clock": round(clock, 3),
        "age": round(row_age, 3) if row_age is not None else None,
        "state": state.word,
        "state_text": state.text,
        "is_over": state.is_over,
        "warning": run.warning(clock),
        "sentences": [
            {"question": question, "text": sentence.text, "tone": sentence.tone}
            for question, sentence in zip(QUESTIONS, run.answers(clock), strict=True)
        ],
        **(_progress(run, last) if last is not None else {}),
    }


def _progress(run: RunFollower, last: MetricsRow) -> dict[str, Any]:
    total = last.steps_total
    left = ""
    if total and 0 < last.step < total and last.seconds:
        left = duration_text((total - last.step) * last.seconds / last.step)
    return {
        "step": last.step,
        "steps_total": total,
        "durable": last.durable_steps,
        "leases": last.leases,
        "epoch": last.epoch,
        "epochs_total": run.settings.get("epochs"),
        "seconds": last.seconds,
        "left": left,
        "life": last.life,
        "node_states": last.node_states,
        "learning_rate": last.learning_rate,
        "load": last.load,
        "memory": last.memory_pss_bytes,
    }


def events(run: RunFollower, newest: int | None = None) -> list[list[Any]]:
    """The newest events, oldest first; so many, or all that are kept."""
    known = list(run.events.newest)
    return [list(event) for event in (known if newest is None else known[len(known) - newest :])]


def trace(run: RunFollower, newest: int | None = None) -> list[dict[str, Any]]:
    """The newest lines of the trace of leases; so many, or all that are kept."""
    known = list(run.trace)
    return known if newest is None else known[max(0, len(known) - newest) :]


def about(run: RunFollower) -> dict[str, Any]:
    """What a run was started with, and its result."""
    manifest = run.manifest
    result = manifest.get("result")
    found = result if isinstance(result, dict) else {}
    versions = manifest.get("versions")
    return {
        "name": run.name,
        "id": str(manifest.get("id", "")),
        "page_version": w5xde.__version__,
        "job": str(manifest.get("job", "")),
        "samples": manifest.get("samples"),
        "settings": run.settings,
        "versions": {key: manifest[key] for key in VERSIONS if manifest.get(key)}
        | (versions if isinstance(versions, dict) else {}),
        "result": {key: found[key] for key in RESULT if found.get(key) is not None},
        "metrics": found.get("metrics") or {},
        "folder": str(run.folder),
    }


def whole(run: RunFollower, clock: float) -> dict[str, Any]:
    """Everything, for a report."""
    return {
        "about": about(run),
        "history": history(run),
        "nodes": nodes(run),
        "now": now(run, clock),
        "events": events(run),
        "trace": trace(run),
        "columns": COLUMNS,
    }
