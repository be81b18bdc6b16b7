"""What happened in a run, in sentences: the newest events of its ledger, read from its end.

A ledger grows by megabytes a minute, and nearly all of it is leases and steps; those are passed over without
decoding. The chain of hashes is not checked here: `w5xde audit` does that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from w5xde.control.modes.base import SOONER
from w5xde.follow.line_tail import last_lines, lines_from
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.ledger_segments import read_segment, segment_name, segments
from w5xde.runtime.durable.sealed_json import Damaged, content_of, parse
from w5xde.sanitize import harmless

EVENTS_MAX = 200
# How far back the first look goes: some seconds of a quick run, all of a slow one.
FIRST_BYTES = 2_000_000
# Compressed segments before that, of 4 MB each, if there are too few events.
EARLIER_SEGMENTS_MAX = 2
EVENTS_ENOUGH = 20
TEXT_MAX = 400

# Kinds that are no news: the work itself.
_WORK = [
    f'"kind":"{kind}"'.encode()
    for kind in ("lend", "took", "step", "cancelled", "fenced", "segment", "epoch", "restore", "resumed")
]


class RunEvent(NamedTuple):
    """Something that happened: when, which kind, in words."""

    time: float
    kind: str
    text: str


class LedgerEvents:
    """The newest events of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._disk = RealDisk(folder)
        self.newest: deque[RunEvent] = deque(maxlen=EVENTS_MAX)
        # How many events there have been.
        self.count = 0
        # The segment that is read, and how far.
        self._number = 0
        self._offset = 0
        # A new segment repeats lines of the one before.
        self._seen: deque[bytes] = deque(maxlen=4 * EVENTS_MAX)

    @property
    def trouble(self) -> list[str]:
        """What is lost, by the events that are known."""
        return [event.text for event in self.newest if event.kind in ("gap", "lost")]

    def poll(self) -> list[RunEvent]:
        """Read on; returns the new events."""
        try:
            fresh = [event for line in self._lines() if (event := self._event(line)) is not None]
        except OSError:
            return []
        self.newest.extend(fresh)
        self.count += len(fresh)
        return fresh

    def _lines(self) -> Iterator[bytes]:
        known = segments(self._disk)
        if not self._number and known:
            yield from self._first_look(known)
            return
        for number, name in known:
            if number < self._number:
                continue
            if number > self._number:
                self._number, self._offset = number, 0
            if name != segment_name(number):
                continue  # compressed since, and read before
            for line in lines_from(self._folder / name, self._offset):
                self._offset = line.end
                yield line.text

    def _first_look(self, known: list[tuple[int, str]]) -> Iterator[bytes]:
        self._number, newest = known[-1]
        lines: list[bytes] = []
        if newest == segment_name(self._number):
            lines, self._offset = last_lines(self._folder / newest, FIRST_BYTES)
        else:
            lines = self._compressed(newest)
        earlier = [name for _, name in reversed(known[:-1])][:EARLIER_SEGMENTS_MAX]
        while earlier and sum(not _is_work(line) for line in lines) < EVENTS_ENOUGH:
            lines = self._compressed(earlier.pop(0)) + lines
        yield from lines

    def _compressed(self, name: str) -> list[bytes]:
        try:
            return read_segment(self._disk, name).split(b"\n")
        except Damaged:
            return []

    def _event(self, line: bytes) -> RunEvent | None:
        if not line or _is_work(line):
            return None
        content = content_of(line)
        if content in self._seen:
            return None
        try:
            event = event_of(parse(content, dict[str, Any]))
        except (Damaged, KeyError, TypeError, ValueError):
            return None
        self._seen.append(content)
        return event


def _is_work(line: bytes) -> bool:
    # The kind is one of the first fields of a record.
    head = line[:200]
    return any(kind in head for kind in _WORK)


def _checkpoint(record: dict[str, Any]) -> str:
    return f"checkpoint: {int(record['version']):,} steps survive a crash"


def _start(record: dict[str, Any]) -> str:
    life = int(record["incarnation"])
    return "the run begins" if life == 1 else f"the coordinator begins its life {life}"


# The sentences of records that have no text of their own.
_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    "checkpoint": _checkpoint,
    "start": _start,
    "refused": lambda record: f"an answer of {record['node']} is refused: {record['reason']}",
    "expired": lambda record: (
        f"{record['node']} gave up {len(record['leases'])} leases ({record['reason']}); they are lent again"
    ),
    "aside": lambda record: (
        f"batch {record['batch']} of epoch {record['epoch']} is set aside: {record['reason']}"
    ),
    "banned": lambda record: f"{record['node']} is banned: {record['reason']}",
    "undo": lambda record: f"step {record['step']} is undone and begins again",
    "gap": lambda record: f"the disk failed, and {record['records']} records of the ledger are missing",
    "lost": lambda record: str(record.get("text") or "a part of the ledger is missing"),
    "model": lambda record: f"the weights of step {record['version']} are saved",
    "best": lambda record: f"the best weights so far are saved (step {record['version']})",
    "override": lambda record: f"the learning rate is changed after step {record.get('version', 0)}",
}


def event_of(record: dict[str, Any]) -> RunEvent | None:
    """The event of a record; None if it is none that people want to read."""
    kind = str(record["kind"])
    if record.get("reason") == SOONER:
        return None  # the copy of a lease, which is no trouble
    if kind in _SENTENCES:
        text = _SENTENCES[kind](record)
    elif "text" in record:
        text = str(record["text"])
    else:
        return None
    return RunEvent(float(record["time"]), harmless(kind)[:40], harmless(text)[:TEXT_MAX])
