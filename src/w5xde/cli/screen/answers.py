"""The answers to four questions about a run, as lines of the terminal, with a small picture of the loss.

`follow/sentences.py` makes the sentences.
"""

from __future__ import annotations

import textwrap
from typing import Any

from rich.text import Text

from w5xde.config import Settings
from w5xde.follow.history import RunHistory
from w5xde.follow.rows import MetricsRow, to_row
from w5xde.follow.sentences import RunFacts, Sentence, learning, safety, speed
from w5xde.sanitize import harmless

_STYLES = {"ok": "", "warn": "yellow", "bad": "bold red"}
_BARS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 12
# The question stands in its own column; its answer may take two lines, because the flag to use comes last.
QUESTION_COLUMNS, LINES_MAX = 10, 2
ROOM_MIN = 20


class RunAnswers:
    """Collects the rows of a run and answers by them."""

    def __init__(self, settings: Settings) -> None:
        self._history = RunHistory()
        self._facts = RunFacts(
            batches_per_step=settings.step_batches,
            loader_workers=settings.loader_workers or 0,
            checkpoint_seconds=settings.save_seconds,
        )

    def add(self, row: dict[str, Any]) -> None:
        """Take the next row of metrics."""
        self._history.add(to_row(row))

    def lines(self, width: int) -> list[Text]:
        """One or two lines for each question but for the one which nodes help: their table answers it."""
        if self._history.last is None:
            return []
        history, facts = self._history, self._facts
        spark = sparkline(history.rows)
        return [
            *_lines("learning?", learning(history, facts), width, spark),
            *_lines("fast?", speed(history, facts), width),
            *_lines("lost?", safety(history, facts), width),
        ]


def _lines(question: str, sentence: Sentence, width: int, spark: str = "") -> list[Text]:
    """A sentence beside its question, on two lines at most; and a picture behind it, if there is room."""
    room = max(ROOM_MIN, width - QUESTION_COLUMNS - 1)
    words = textwrap.wrap(harmless(sentence.text), room, max_lines=LINES_MAX, placeholder=" …")
    columns = [f"{question:<{QUESTION_COLUMNS}}", " " * QUESTION_COLUMNS]
    style = _STYLES[sentence.tone]
    lines = [
        Text.assemble((column, "dim"), (line, style)) for column, line in zip(columns, words, strict=False)
    ]
    if spark and len(words) == 1 and len(words[0]) + len(spark) + 2 <= room:
        lines[0].append(f"  {spark}", "dim")
    for line in lines:
        line.overflow, line.no_wrap = "ellipsis", True
    return lines


def sparkline(rows: list[MetricsRow], columns: int = SPARK_COLUMNS) -> str:
    """The loss from the first row to the last, in so many characters; empty while there is no course."""
    losses = [row.loss for row in rows if row.loss is not None]
    if len(losses) < columns:
        return ""
    chosen = [losses[at * (len(losses) - 1) // (columns - 1)] for at in range(columns)]
    least, most = min(chosen), max(chosen)
    if most <= least:
        return _BARS[0] * columns
    return "".join(_BARS[min(7, int(8 * (loss - least) / (most - least)))] for loss in chosen)
