"""The history of a run: its rows, fewer of the older ones, and the newest facts of each node.

Pure: rows come in, and nothing else is asked. Bounded, however long the run is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from w5xde.follow.rows import MetricsRow, NodeRow

# As many points as a chart can show.
ROWS_MAX = 2000
# Over this long a sentence about speed holds.
RECENT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """What a node did in the last seconds."""

    name: str
    first: NodeRow
    last: NodeRow

    @property
    def busy(self) -> float:
        return self.last.busy_seconds - self.first.busy_seconds

    @property
    def wait(self) -> float:
        return self.last.wait_seconds - self.first.wait_seconds

    @property
    def network(self) -> float:
        return self.last.network_seconds - self.first.network_seconds

    @property
    def codec(self) -> float:
        return self.last.codec_seconds - self.first.codec_seconds

    @property
    def on_core(self) -> float:
        return self.last.on_core_seconds - self.first.on_core_seconds

    @property
    def samples(self) -> int:
        return self.last.samples - self.first.samples

    @property
    def seconds(self) -> float:
        """Its time, computing or waiting; never 0."""
        return max(self.busy + self.wait, 1e-9)


class RunHistory:
    """The rows of one run, oldest first."""

    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        self.nodes: dict[str, NodeRow] = {}
        self._recent: deque[MetricsRow] = deque()
        # Of the rows that are kept, one in so many was.
        self._stride = 1
        self._skipped = 0

    def add(self, row: MetricsRow) -> None:
        """Add the next row."""
        self.nodes.update(row.node_facts)
        self._recent.append(row)
        while row.time - self._recent[0].time > RECENT_SECONDS or row.life != self._recent[0].life:
            self._recent.popleft()
        # Hours of facts of nodes would fill the memory, and only those of the last seconds are asked for.
        row = msgspec.structs.replace(row, node_facts={}) if row.node_facts else row
        if self.rows and self._skipped + 1 < self._stride:
            # The newest row is always there, in place of the one before it.
            self._skipped += 1
            self.rows[-1] = row
            return
        self._skipped = 0
        self.rows.append(row)
        if len(self.rows) > ROWS_MAX:
            self.rows = self.rows[::2]
            self._stride *= 2

    @property
    def last(self) -> MetricsRow | None:
        return self.rows[-1] if self.rows else None

    @property
    def recent(self) -> list[MetricsRow]:
        """The rows of the last seconds, in this life of the coordinator."""
        return list(self._recent)

    @property
    def recent_seconds(self) -> float:
        return self._recent[-1].time - self._recent[0].time if self._recent else 0.0

    def spans(self) -> list[NodeSpan]:
        """What each node that works did in the last seconds."""
        first: dict[str, NodeRow] = {}
        last: dict[str, NodeRow] = {}
        for row in self._recent:
            for name, node in row.node_facts.items():
                first.setdefault(name, node)
                last[name] = node
        return [
            NodeSpan(name, first[name], node)
            for name, node in last.items()
            if node.state == "working" and node.busy_seconds >= first[name].busy_seconds
        ]
