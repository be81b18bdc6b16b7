"""Every script in docs/pool.md runs as it stands there, and says of itself what is true."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.processes import forked

TEXT = (Path(__file__).parents[1] / "docs" / "pool.md").read_text(encoding="utf-8")
SCRIPTS = {
    section.splitlines()[0]: block
    for section in TEXT.split("\n## ")[1:]
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


def test_every_python_block_is_found() -> None:
    assert len(SCRIPTS) == TEXT.count("```python") >= 3


@pytest.mark.parametrize("title", SCRIPTS)
def test_a_script_runs_as_it_stands(title: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPTS[title], encoding="utf-8")
    with forked(lambda: runpy.run_path(str(file), run_name="__main__")) as running:
        assert running.wait() == 0, running.text


def test_a_plain_loop_changes_in_four_lines() -> None:
    lines = [line.strip() for line in SCRIPTS["A plain loop"].splitlines()]
    added = [line for line in lines if re.search(r"^import w5xde$|w5xde\.Pool|\bpool\b", line)]
    assert len(added) == 4, added
