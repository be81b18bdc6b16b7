"""What keeps a node from joining or from going on, from its own side: each told with its own code."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import w5xde
from tests.processes import JOBS
from tests.sockets import answering, clear_ticket, full_backlog
from tests.system.jobs import job
from w5xde.cli import main as cli
from w5xde.config import Settings
from w5xde.errors import JoinError, TrainingError, UsageError, W5xdeError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.messages import Bye, Rules, Welcome
from w5xde.protocol.wire import encode
from w5xde.runtime.net import dialer as route
from w5xde.runtime.node.fork_server import ForkServer
from w5xde.runtime.node.local_node import run_local_node


def welcome() -> bytes:
    layout = prepare(job, Settings()).learner.flat.blueprint.layout
    rules = Rules(mode="sync", seed=0, precision="fp32", threads=1, data="stream")
    return encode(Welcome(run="tuesday", incarnation=1, name="guest", layout=layout, rules=rules))


def saying(*frames: bytes) -> Callable[[socket.socket], None]:
    """A coordinator that answers every greeting with these, and hangs up when the node does."""

    def answer(connection: socket.socket) -> None:
        if connection.recv(4096):
            connection.sendall(b"".join(frames))
            while connection.recv(4096):
                pass

    return answer


def test_a_port_that_hangs_up_on_everybody_is_no_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda connection: None) as address:
        status = cli.main(["join", clear_ticket(address), f"{JOBS}:job", "--wait", "0"])
    assert status == JoinError.exit_code
    assert capsys.readouterr().err.startswith("error[W5-102]: ")


def test_a_coordinator_behind_a_firewall_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route, "DIAL_SECONDS", 0.2)
    with full_backlog() as address, pytest.raises(JoinError, match="no answer from") as silent:
        w5xde.join(clear_ticket(address), job, wait=0)
    assert silent.value.code == "W5-104"
    assert "firewall" in silent.value.fix


def test_a_node_that_is_turned_out_says_why() -> None:
    turned_out = saying(welcome(), encode(Bye("it answered nonsense", finished=False)))
    with answering(turned_out) as address, pytest.raises(JoinError, match="it answered nonsense") as out:
        w5xde.join(clear_ticket(address), job, wait=0)
    assert out.value.code == "W5-112"


def test_a_node_that_breaks_says_so_and_does_not_blame_a_batch() -> None:
    broken = w5xde.Job(model=lambda: sys.exit(3), data=job.data, loss=job.loss, optimizer=job.optimizer)
    with (
        answering(saying(welcome())) as address,
        pytest.raises(TrainingError, match="SystemExit: 3") as broke,
    ):
        w5xde.join(clear_ticket(address), broken, wait=0)
    assert broke.value.code == "W5-302"


def test_a_system_that_cannot_fork_is_told_how_to_start_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "fork")
    with pytest.raises(UsageError, match="cannot fork") as refused:
        ForkServer(job, Settings(), run_local_node)
    assert refused.value.code == "W5-303"
    assert "w5xde join" in refused.value.fix


def test_our_own_bug_is_told_as_one_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(runs: str, name: str) -> Path:
        raise RuntimeError("never thought of that")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "find_run", broken)
    assert cli.main(["audit", "latest"]) == W5xdeError.exit_code
    told = capsys.readouterr().err
    assert told.startswith("error[W5-700]: internal error: RuntimeError: never thought of that")
    assert "Traceback" not in told
