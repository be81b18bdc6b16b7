"""Every story goes as it is told. `python -m tests.control.test_stories --rewrite` tells them anew."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import pytest

from tests.control.story import retold

STORIES = sorted((Path(__file__).parent / "stories").glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_the_story_goes_as_told(path: Path) -> None:
    told = path.read_text(encoding="utf-8")
    really = retold(told)
    if really != told:
        difference = difflib.unified_diff(
            told.splitlines(),
            really.splitlines(),
            f"{path.name} as told",
            "as the core has it",
            lineterm="",
            n=100,
        )
        pytest.fail(
            "\n".join(difference) + "\n\nmeant so? python -m tests.control.test_stories --rewrite",
            pytrace=False,
        )


def test_every_story_begins_with_its_moral() -> None:
    for path in STORIES:
        assert path.read_text(encoding="utf-8").startswith("# "), path.name


def test_a_story_that_goes_otherwise_is_told_so() -> None:
    told = "run samples=1 step=1\njoin a                  → lend a #1: batch 5 (step 0, v0)\n"
    assert retold(told) != told
    assert "lend a #1: batch 0 (step 0, v0)" in retold(told)
    assert retold(retold(told)) == retold(told)


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("usage: python -m tests.control.test_stories --rewrite")
    for story in STORIES:
        before = story.read_text(encoding="utf-8")
        after = retold(before)
        if after != before:
            story.write_text(after, encoding="utf-8")
            print(f"{story.name} is retold")
