"""The scripts of docs/porting.md, before and after their change, and how many lines that is."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import NamedTuple

from tests.processes import ROOT

TEXT = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
SECTIONS = ("A plain loop", "Hugging Face", "Lightning", "A loop of your own")


class Change(NamedTuple):
    before: str
    after: str


def changes() -> dict[str, Change]:
    """The change of each section: one `diff` block of the whole script, or the script twice."""
    return {title: _change(section_of(title)) for title in SECTIONS}


def section_of(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def _change(section: str) -> Change:
    marked = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    if not marked:
        before, after = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        return Change(before, after)
    lines = marked[0].splitlines()
    return Change(*("\n".join(line[1:] for line in lines if line[:1] != skipped) for skipped in "+-"))


def changed_lines(before: str, after: str) -> int:
    """Lines that are new, other or gone; empty lines and indentation do not count."""
    old, new = ([line.strip() for line in text.splitlines() if line.strip()] for text in (before, after))
    matched = SequenceMatcher(None, old, new, autojunk=False)
    return sum(
        max(old_end - old_start, new_end - new_start)
        for kind, old_start, old_end, new_start, new_end in matched.get_opcodes()
        if kind != "equal"
    )
