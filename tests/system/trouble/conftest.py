"""Jobs that get stuck when a test says so."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder whose files say what of the jobs `stuck` and `stuck_evaluated` never ends.

    `batch`, `sample` or `evaluation`. The test is in the folder in which its user would be.
    """
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "stuck"
    folder.mkdir()
    monkeypatch.setenv("TEST_STUCK", str(folder))
    return folder
