"""The types of the Python interface are those of the schema: type checkers find a misspelt setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests.processes import run_python
from w5xde.specs.command_settings import COMMAND_SETTINGS
from w5xde.specs.setting_help import setting_type
from w5xde.specs.typed_settings import JoinSettings, ServeSettings, TrainSettings

# `nodes` is a parameter of `train` by itself.
TYPED: dict[str, tuple[type, set[str]]] = {
    "train": (TrainSettings, {"nodes"}),
    "serve": (ServeSettings, set()),
    "join": (JoinSettings, set()),
}


@pytest.mark.parametrize("command", TYPED)
def test_every_setting_of_the_schema_is_typed_alike_and_there_is_no_other(command: str) -> None:
    typed, besides = TYPED[command]
    expected: dict[str, Any] = {
        setting: setting_type(setting) for setting in COMMAND_SETTINGS[command] if setting not in besides
    }
    found = get_type_hints(typed)
    assert found == expected, "write in specs/typed_settings.py what the schema says"
    assert typed.__total__ is False, "every setting may be left out"


PROGRAM = """import w5xde

w5xde.train("job.py", nodes=4, batch_size=3, mode="async")
w5xde.train("job.py", nodes="auto", epochs=None)
w5xde.serve("job.py", nodes=2, host="0.0.0.0").model.eval()
w5xde.join(None, "job.py", nodes="auto", wait=3, progress=False)
w5xde.join(locate=lambda: None, job="job.py", wait="1h")
w5xde.train("job.py", batchsize=3)
w5xde.train("job.py", batch_size="3")
w5xde.train("job.py", mode="sinc")
w5xde.join(None, "job.py", epochs=3)
w5xde.join(locate=lambda: 5555)
"""


def test_a_type_checker_finds_misspelt_settings_and_wrong_values(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # With the settings and the cache of `make lint`, of which this does a part.
    done = run_python("-m", "mypy", "--config-file", "pyproject.toml", str(program))
    wrong = re.findall(r"program\.py:(\d+): error: (.*)  \[", done.stdout)
    assert [line for line, _ in wrong] == ["8", "9", "10", "11", "12", "12"], done.stdout
    assert wrong[0][1] == 'Unexpected keyword argument "batchsize" for "train"; did you mean "batch_size"?'
