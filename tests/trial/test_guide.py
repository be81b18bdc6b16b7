"""docs/porting.md: what it says of its scripts and of the jobs that were tried is true."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.processes import command
from tests.trial import guide
from tests.trial.attempt import attempts, row
from w5xde.cli.parser import build_parser

LINES_MAX = {"Hugging Face": 3, "Lightning": 3, "A loop of your own": 4}
COMMANDS = [line.removeprefix("$ w5xde ") for line in guide.TEXT.splitlines() if line.startswith("$ w5xde ")]


def rows(section: str) -> list[list[str]]:
    """The cells of the first table of a section, without its head."""
    lines = guide.section_of(section).split("\n|", 1)[1].split("\n\n", 1)[0].split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_script_of_the_guide_is_tried() -> None:
    scripts = guide.TEXT.count("```diff") + guide.TEXT.count("```python") / 2
    assert scripts == len(guide.changes()) == 4


@pytest.mark.parametrize("section", LINES_MAX)
def test_a_script_changes_in_few_lines(section: str) -> None:
    change = guide.changes()[section]
    assert "w5xde" not in change.before
    assert 0 < guide.changed_lines(*change) <= LINES_MAX[section]


def test_lines_are_counted() -> None:
    before = "import a\n\nfor b in c:\n    d(b)\ne()\n"
    assert guide.changed_lines(before, before) == 0
    assert (
        guide.changed_lines(before, "import a\nimport w\nwith w:\n    for b in c:\n        d(b)\n    e()\n")
        == 2
    )
    assert guide.changed_lines(before, "import a\nfor b in c:\n    f(b)\ne()\n") == 1
    assert guide.changed_lines(before, "import a\n") == 3


def test_the_first_table_says_how_many_lines_change() -> None:
    told = [int(cells[2]) for cells in rows("Which way is mine?")]
    assert told == [guide.changed_lines(*guide.changes()[title]) for title in guide.SECTIONS]


def test_the_last_table_has_every_job_that_is_tried() -> None:
    differences = [cells[3] for cells in rows("Jobs that were tried")]
    assert all(float(each) < 1e-6 for each in differences)
    expected = [
        row(*found, difference) for found, difference in zip(attempts().items(), differences, strict=True)
    ]
    assert "\n".join(expected) in guide.section_of("Jobs that were tried")


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_can_be_typed(line: str) -> None:
    build_parser().parse_args(shlex.split(line, comments=True))


def test_a_command_of_the_guide_trains_its_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(guide.changes()["A plain loop"].after, encoding="utf-8")
    words = shlex.split(COMMANDS[0], comments=True)
    with command(*words, "--nodes", "2", cwd=tmp_path) as run:
        assert run.wait() == 0, run.text
    assert "8 × 4 = 32 samples a step" in run.text
