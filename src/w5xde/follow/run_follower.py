"""Follows one run by its folder: rows, events, leases and state, for views of any kind.

What is old is read once and kept thinned, so that a view that comes late gets a whole picture at once. Knows
no clock: callers pass the time of day.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from w5xde.cli.units import duration_text
from w5xde.config import parse_every
from w5xde.errors import StorageError
from w5xde.follow.chart_points import ChartPoints
from w5xde.follow.history import RunHistory
from w5xde.follow.ledger_events import LedgerEvents
from w5xde.follow.line_tail import last_lines, lines_from, size_of
from w5xde.follow.old_rows import old_rows
from w5xde.follow.rows import MetricsRow, NodeRow, read_row
from w5xde.follow.run_state import NEWS_SECONDS, FollowedState, state_of
from w5xde.follow.sentences import RunFacts, Sentence, answers
from w5xde.runs import METRICS, TRACE, read_manifest

# Of older rows the facts of nodes are not decoded: there are megabytes of them, and newer ones replace them.
# With a thousand nodes, each has its turn within so many bytes.
WHOLE_BYTES = 8 * 1024 * 1024
# As many lines of the trace as a picture of the last seconds needs.
TRACE_BYTES, TRACE_LINES = 400_000, 60


class RunFollower:
    """One run, as far as its files are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.manifest = read_manifest(folder)
        self._manifest_at = _changed_at(folder)
        self.history = RunHistory()
        self.points = ChartPoints()
        self.events = LedgerEvents(folder)
        # How far metrics.jsonl and trace.jsonl are read.
        self.offset = 0
        self._trace_offset: int | None = None
        self.trace: deque[dict[str, Any]] = deque(maxlen=TRACE_LINES)
        self.trace_count = 0

    def poll(self) -> bool:
        """Read on; returns whether there is news."""
        count = self.events.count, self.trace_count
        has_rows = self._read_rows()
        self.events.poll()
        self._read_trace()
        return self._read_manifest() or has_rows or count != (self.events.count, self.trace_count)

    def _read_rows(self) -> bool:
        path, begin = self.folder / METRICS, self.offset
        size = size_of(path)
        if size < begin:
            # Another file than the one that was read.
            self.history, self.points, self.offset, begin = RunHistory(), ChartPoints(), 0, 0
        if size == begin:
            return False
        if size - begin > WHOLE_BYTES:
            for self.offset, row in old_rows(path, begin, size - WHOLE_BYTES):
                self._add(row)
        for line in lines_from(path, self.offset):
            self.offset = line.end
            self._add(read_row(line.text))
        return self.offset > begin

    def _add(self, row: MetricsRow | None) -> None:
        if row is not None:
            self.history.add(row)
            self.points.add(row)

    def _read_trace(self) -> None:
        path = self.folder / TRACE
        if self._trace_offset is None or size_of(path) < self._trace_offset:
            lines, self._trace_offset = last_lines(path, TRACE_BYTES)
        else:
            lines = []
            for line in lines_from(path, self._trace_offset):
                self._trace_offset = line.end
                lines.append(line.text)
        for text in lines:
            try:
                self.trace.append(msgspec.json.decode(text, type=dict[str, Any]))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self.trace_count += 1

    def _read_manifest(self) -> bool:
        changed_at = _changed_at(self.folder)
        if changed_at == self._manifest_at:
            return False
        try:
            self.manifest = read_manifest(self.folder)
        except StorageError:
            return False  # it is being replaced, or the folder was removed
        self._manifest_at = changed_at
        return True

    # --- what it says -----------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        found = self.manifest["settings"]
        return found if isinstance(found, dict) else {}

    def state(self, now: float) -> FollowedState:
        """What the run is doing at this time of day."""
        return state_of(self.folder, self.manifest, self.row_age(now))

    def row_age(self, now: float) -> float | None:
        """How old the newest row is; None without rows, and for rows that do not say."""
        last = self.history.last
        return max(0.0, now - last.time) if last is not None and last.time else None

    def warning(self, now: float) -> str:
        """A sentence if a run that should go on gives no news; else nothing."""
        state, age, last = self.state(now), self.row_age(now), self.history.last
        if state.word not in ("training", "gone") or age is None or last is None or age < NEWS_SECONDS:
            return ""
        safe = f"{last.durable_steps:,} steps survive a crash"
        news = f"No news for {duration_text(age) if age >= 60 else f'{age:.0f} s'}; {safe}"
        return f"{news}: {state.text}" if state.word == "gone" else f"{news}."

    def answers(self, now: float) -> list[Sentence]:
        """The answers to the four questions."""
        return answers(self.history, self.facts(self.state(now)))

    def facts(self, state: FollowedState) -> RunFacts:
        settings = self.settings
        return RunFacts(
            batches_per_step=int(settings.get("batches_per_step") or 1),
            loader_workers=int(settings.get("loader_workers") or 0),
            checkpoint_seconds=_checkpoint_seconds(settings),
            join_line=f"w5xde ticket new {self.name}",
            is_over=state.is_over,
            trouble=self.events.trouble,
        )

    def node_shares(self) -> dict[str, tuple[float, float, float, float]]:
        """Of each node, the shares of its time: computing, codec, network, waiting; of late, if known."""
        found = {name: _shares(node) for name, node in self.history.nodes.items()}
        for span in self.history.spans():
            if span.busy + span.wait > 0:
                found[span.name] = _parts(span.busy, span.codec, span.network, span.wait)
        return found


def _shares(node: NodeRow) -> tuple[float, float, float, float]:
    return _parts(node.busy_seconds, node.codec_seconds, node.network_seconds, node.wait_seconds)


def _parts(busy: float, codec: float, network: float, wait: float) -> tuple[float, float, float, float]:
    """Shares that add up to 1, or are all 0: a node encodes and sends also while it computes."""
    total = busy + wait
    if total <= 0:
        return (0.0, 0.0, 0.0, 0.0)
    codec = min(codec, wait)
    network = min(network, wait - codec)
    rest = wait - codec - network
    return (busy / total, codec / total, network / total, rest / total)


def _checkpoint_seconds(settings: dict[str, Any]) -> float | None:
    try:
        return parse_every(str(settings.get("checkpoint_every", "30s")))[0]
    except ValueError:
        return None


def _changed_at(folder: Path) -> int:
    try:
        return (folder / "manifest.json").stat().st_mtime_ns
    except OSError:
        return 0
