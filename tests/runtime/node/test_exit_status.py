"""The exit status of a local node carries its error code."""

from __future__ import annotations

import signal

from w5xde.errors import JoinError, W5xdeError
from w5xde.explanations import EXPLANATIONS
from w5xde.runtime.node.exit_status import describe_status, exit_status


def test_every_code_has_a_status_of_its_own_that_a_process_can_end_with():
    statuses = {code: exit_status(JoinError("", code=code)) for code in EXPLANATIONS}
    assert len(set(statuses.values())) == len(EXPLANATIONS)
    assert max(statuses.values()) <= 255
    assert all(describe_status(status) == f"error {code}" for code, status in statuses.items())


def test_other_statuses_are_told_as_they_are():
    assert describe_status(exit_status(JoinError("", code="W5-999"))) == "status 10"
    assert describe_status(W5xdeError.exit_code) == "status 70"
    assert describe_status(-signal.SIGKILL) == "signal 9"
