"""Secrets are in the line that is handed on, in the files that keep them, and nowhere else."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.processes import JOBS, command, wait_for_file
from w5xde.errors import NOT_OVER
from w5xde.messages import Hello, Layout, Rules, Welcome
from w5xde.ticket import parse


def forms(secret: bytes) -> list[bytes]:
    """The ways in which bytes are usually written."""
    return [
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
        repr(secret).encode()[2:-1],
        json.dumps(list(secret)).encode(),
    ]


def seen_by_others() -> Iterator[tuple[str, bytes]]:
    """What `ps` shows of every process."""
    for process in psutil.process_iter():
        try:
            yield f"arguments of {process.pid}", "\0".join(process.cmdline()).encode()
            environ = Path(f"/proc/{process.pid}/environ")
            yield f"environment of {process.pid}", environ.read_bytes() if environ.exists() else b""
        except (psutil.Error, OSError):
            continue


def test_no_secret_is_in_any_output_file_or_list_of_processes(tmp_path: Path) -> None:
    runs, ticket_file = tmp_path / "runs", tmp_path / "ticket"
    states = {name: str(tmp_path / f"state-{name}") for name in ("serve", "join")}
    words = ["serve", f"{JOBS}:slow", "--host", "0.0.0.0", "--port", "0", "--nodes", "1", "--epochs", "9999"]
    words += ["--ticket-file", str(ticket_file), "--name", "mine", "--runs", str(runs), "--json"]
    words += ["--log", "silent"]
    with command(*words, is_fresh=True, W5XDE_STATE=states["serve"]) as served:
        assert wait_for_file(ticket_file).stat().st_mode & 0o777 == 0o600
        ticket = parse(ticket_file.read_text())
        join = ["join", "--nodes", "1", f"@{ticket_file}", f"{JOBS}:slow", "--log", "verbose"]
        with command(*join, is_fresh=True, W5XDE_STATE=states["join"]) as node:
            node.wait_for("joined mine")
            # A node that is refused, which logs every detail.
            with command(
                "join", "--nodes", "1", f"@{ticket_file}", f"{JOBS}:other", "--log", "verbose"
            ) as wrong:
                assert wrong.wait() == 10
            processes = list(seen_by_others())
            served.interrupt()
            assert node.wait() == NOT_OVER
            assert served.wait() == NOT_OVER
    [kept] = Path(states["join"]).rglob("*.json")
    credential = bytes.fromhex(json.loads(kept.read_bytes())["sealed"]["secret"])
    secrets = {
        "the ticket": [ticket.to_text().encode(), *forms(ticket.secret.reveal())],
        "the credential": forms(credential),
    }
    printed = {"serve": served, "join": node, "wrong": wrong}
    places = [(name, process.text.encode()) for name, process in printed.items()]
    places += [*processes, *((str(path), path.read_bytes()) for path in runs.rglob("*") if path.is_file())]
    assert len(places) > 20
    for where, content in places:
        for what, written in secrets.items():
            assert not any(form in content for form in written), f"{what} is in {where}"
    # And that would have been found.
    assert any(form in kept.read_bytes() for form in secrets["the credential"])
    key = next(Path(states["serve"]).rglob("*.pem")).read_bytes()
    assert b"PRIVATE KEY" in key
    assert not any(b"PRIVATE KEY" in content for _, content in places)


def test_a_message_that_is_shown_hides_its_secret() -> None:
    hello = Hello(protocol=1, package="0", name="a", ticket=b"secret ticket", credential=b"secret credential")
    rules = Rules(mode="sync", seed=0, precision="fp32", threads=1, data="stream")
    welcome = Welcome("run", 1, "a", Layout([]), rules, credential=b"secret credential")
    for shown in (repr(hello), str(hello), f"{hello}", repr(welcome), str(list(hello.__rich_repr__()))):
        assert "secret" not in shown
        assert "***" in shown
    assert "package='0'" in repr(hello)
