"""Scripts as people have them train what their own loops train, the same bits for 1, 2 and 7 nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trial.attempt import attempt, attempts, try_script
from tests.trial.scripts import SCRIPTS, SHARED

ATTEMPTS = attempts()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_a_script_trains_what_its_own_loop_trains_whichever_nodes_help(name: str, tmp_path: Path) -> None:
    assert attempt(ATTEMPTS[name].compare, tmp_path) < 1e-6


def test_a_run_that_trains_something_else_is_found(tmp_path: Path) -> None:
    shorter = SCRIPTS["LoRA on a frozen base"]._replace(flags={**SHARED, "epochs": 2})
    with pytest.raises(AssertionError, match="not the weights of the other loop"):
        attempt(lambda: try_script(shorter), tmp_path)
