"""Code that comes with the run, in real processes: shown, agreed to, and the same weights as ever."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import (
    JOBS,
    command,
    coordinator,
    forked,
    resumed,
    sha256_of,
    ticket_of,
    wait_until,
)
from tests.system import jobs
from w5xde.api import Watcher, run_node
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.errors import NOT_OVER
from w5xde.learn.job import named_job
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.message_types import CODE_BYTES_MAX

HELPER = """\
from torch import nn

def model():
    return nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
"""
# Says where it ran, which is the proof that it did not run before.
TRAIN = """\
import os, time, torch, w5xde, helper
from pathlib import Path
from torch.nn.functional import cross_entropy

Path(f"ran-{os.getpid()}").touch()

def data():
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(200, 10, generator=generator)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1).remainder(4).floor().long())

def loss(model, batch):
    time.sleep(float(os.environ.get("TEST_BATCH_SECONDS", "0")))
    return cross_entropy(model(batch[0]), batch[1])

job = w5xde.Job(model=helper.model, data=data, loss=loss, optimizer=lambda params: torch.optim.Adam(params))
"""
# The same without a module beside it.
ALONE = TRAIN.replace(", helper", "").replace("helper.model", "lambda: torch.nn.Linear(10, 4)")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """Nobody has agreed to anything yet; and jobs that run here say so in a folder of the test."""
    monkeypatch.setenv("W5XDE_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def there(tmp_path):
    """The folder of the coordinator, with its job."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "helper.py").write_text(HELPER)
    return folder


@pytest.fixture
def here(tmp_path):
    """The folder of the node, which is empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def weights(folder: Path, run: str) -> str:
    found: dict[str, Any] = json.loads((folder / "runs" / run / "manifest.json").read_text())
    return str(found["result"]["weights_sha256"])


def serve(folder: Path, name: str, *flags: str) -> Any:
    return command("serve", "train.py", "--port", "0", "--epochs", "2", "--name", name, *flags, cwd=folder)


@pytest.mark.parametrize("data", ["stream", "local"])
def test_a_node_without_a_copy_trains_the_same_weights_as_one_with_it(there, here, data):
    options = ["--data", data, "--ship", "helper.py"]
    with serve(there, "with-job", *options) as run:
        with command("join", ticket_of(run), str(there / "train.py"), cwd=there) as helper:
            assert helper.wait() == 0, helper.text
        assert run.wait() == 0, run.text
    with serve(there, "without", *options) as run:
        ticket, sha256 = ticket_of(run), sha256_of(run)
        with command("join", ticket, cwd=here) as refused:
            assert refused.wait() == w5xde.JoinError.exit_code
        assert "error[W5-285]" in refused.text
        assert f"w5xde join TICKET --accept-code {sha256}" in refused.text
        with command("join", ticket, "--accept-code", "0" * 64, cwd=here) as other:
            assert other.wait() == w5xde.JoinError.exit_code
        assert "error[W5-285]" in other.text
        assert list(here.iterdir()) == [], "nothing of it ran"
        with command("join", ticket, "--accept-code", sha256, cwd=here) as helper:
            assert helper.wait() == 0, helper.text
        assert run.wait() == 0, run.text
    assert [path.name.split("-")[0] for path in here.iterdir()] == ["ran"]
    assert weights(there, "without") == weights(there, "with-job")
    manifest = json.loads((there / "runs" / "without" / "manifest.json").read_text())
    assert manifest["code_sha256"] == sha256
    files = {name: (there / name).read_bytes() for name in ("train.py", "helper.py")}
    assert CodeBundle.of("train.py", files).sha256 == sha256


def test_a_module_that_was_not_sent_is_named_with_the_flag_that_sends_it(there, here):
    with serve(there, "alone") as run:
        ticket, sha256 = ticket_of(run), sha256_of(run)
        run.wait_for("also need helper.py: send that with --ship helper.py")
        with command("join", ticket, "--accept-code", sha256, cwd=here) as lacking:
            assert lacking.wait() == w5xde.JobError.exit_code
        assert (
            "error[W5-288]: train.py imports helper, which the coordinator has and did not send"
            in lacking.text
        )
        assert "--ship helper.py" in lacking.text
    assert list(here.iterdir()) == []


def test_a_ticket_from_the_environment_or_a_file_needs_no_job_either(there, here):
    with serve(there, "quiet", "--ship", "helper.py", "--ticket-file", str(here / "ticket")) as run:
        ticket, sha256 = ticket_of(run), sha256_of(run)
        with command("join", "@ticket", cwd=here) as refused:
            assert refused.wait() == w5xde.JoinError.exit_code
        assert f"to run this code:  w5xde join @ticket --accept-code {sha256}" in refused.text
        with command("join", "train.py", cwd=here) as lost:
            assert lost.wait() == 2
        assert "error[W5-116]: no ticket was given" in lost.text
        variables = {"W5XDE_TICKET": ticket, "W5XDE_ACCEPT_CODE": sha256}
        with command("join", "nothere.py", cwd=here, **variables) as wrong:
            assert wrong.wait() == w5xde.JobError.exit_code
        assert "there is no job file nothere.py" in wrong.text
        with command("join", cwd=here, **variables) as helper:
            assert helper.wait() == 0, helper.text
        assert run.wait() == 0, run.text


# --- in a terminal --------------------------------------------------------------------------------


class Terminal:
    """A command in a terminal of its own, at which a test reads and types; a fork of this process."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            _run_in_terminal(words, folder)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # Reading fails once the process has ended.
        with suppress(OSError):
            while part := os.read(self._master, 65536):
                self.text += part.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str, count: int = 1) -> None:
        wait_until(lambda: self.text.count(text) >= count, lambda: f"no {text!r} in:\n{self.text[-2000:]}")

    def type(self, line: str) -> None:
        os.write(self._master, line.encode())

    def wait(self) -> int:
        """Wait for the command to close its terminal, and return its exit code."""
        wait_until(lambda: not self._reader.is_alive(), lambda: f"it does not end:\n{self.text[-2000:]}")
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._reader.join()
        os.close(self._master)


def _run_in_terminal(words: list[str], folder: Path) -> None:
    status = 1
    try:
        # Pytest's streams do not lead to the terminal.
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(number, "w" if number else "r") for number in (0, 1, 2)
        )
        os.chdir(folder)
        os.environ |= {"PAGER": "cat", "TERM": "xterm", "COLUMNS": "80"}
        status = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


@contextmanager
def terminal(*words: str, cwd: Path) -> Iterator[Terminal]:
    opened = Terminal(list(words), cwd)
    try:
        yield opened
    finally:
        opened.close()


QUESTION = "run it here? [y/N/show] "


def test_in_a_terminal_the_code_is_shown_asked_about_and_remembered(there, here):
    (there / "train.py").write_text(TRAIN + "# \u202e hidden \x1b[2J\n")
    with serve(there, "asked", "--ship", "helper.py", "--epochs", "9999") as run:
        ticket, sha256 = ticket_of(run), sha256_of(run)
        with terminal("join", ticket, cwd=here) as no:
            no.wait_for(QUESTION)
            assert "sends the code of its job:" in no.text
            assert "helper.py" in no.text
            assert f"job train.py, sha256 {sha256}" in no.text
            no.type("show\n")
            no.wait_for(QUESTION, 2)
            assert "     1 | import os, time, torch, w5xde, helper" in no.text
            assert "# <U+202E> hidden <U+001B>[2J" in no.text
            assert "\u202e" not in no.text
            assert "\x1b[2J" not in no.text
            no.type("\n")
            assert no.wait() == w5xde.JoinError.exit_code
            assert "error[W5-285]: the coordinator's code was not accepted, and nothing of it ran" in no.text
        assert list(here.iterdir()) == []
        with terminal("join", ticket, "--name", "first", cwd=here) as yes:
            yes.wait_for(QUESTION)
            yes.type("y\n")
            run.wait_for("first joined")
            yes.type("\x03")
            assert yes.wait() == NOT_OVER, yes.text[-2000:]
        assert [path.name.split("-")[0] for path in here.iterdir()] == ["ran"]
        with terminal("join", ticket, cwd=here) as again:
            run.wait_for("first joined")
            again.type("\x03")
            assert again.wait() == NOT_OVER, again.text[-2000:]
            assert QUESTION not in again.text


# --- restarts, versions, and jobs without files ---------------------------------------------------


def test_a_node_leaves_a_coordinator_that_comes_back_with_another_job(there, tmp_path):
    job, runs = str(there / "train.py"), tmp_path / "runs"
    runs.mkdir()
    (there / "train.py").write_text(ALONE)
    options: dict[str, Any] = {"nodes": 0, "checkpoint_every": "1steps"}
    with coordinator(runs, job, **options) as first:
        sha256 = CodeBundle.of("train.py", {"train.py": ALONE.encode()}).sha256

        def join() -> None:
            os.environ["TEST_BATCH_SECONDS"] = "0.01"
            os.chdir(tmp_path)
            try:
                w5xde.join(first.ticket, accept_code=sha256)
            except w5xde.JoinError as error:
                print(f"ended with {error.code}: {error.what}")

        with forked(join) as helper:
            first.wait_for_step(2)
            first.kill()
            with resumed(first, job) as same:
                same.wait_for_step(first.step() + 2)
                same.kill()
                (there / "train.py").write_text(f"{ALONE}# changed\n")
                with resumed(same, job) as changed:
                    helper.wait_for("ended with W5-289: the coordinator's job has changed")
                    changed.wait_until_recorded("did not join: the coordinator's job has changed")


class Notes(Watcher):
    """Prints what a node has to tell its user."""

    def node_note(self, kind: str, text: str) -> None:
        print(text)


def test_versions_that_differ_are_said_on_both_sides_and_refuse_nobody(tmp_path, monkeypatch):
    real = named_job.versions_for
    with coordinator(tmp_path) as run:
        monkeypatch.setattr(named_job, "versions_for", lambda sources: real(sources) | {"torch": "1.0"})
        settings = Settings(node_name="old")
        with forked(lambda: run_node(run.ticket, f"{JOBS}:slow", settings, watcher=Notes())) as old:
            old.wait_for("other versions than the coordinator's, which can change bits: torch 1.0 (there 2.")
            run.wait_until_recorded("old has other versions, which can change bits: torch 1.0 (here 2.")
            run.wait_for_step(1)
            old.interrupt()
            assert old.wait() == 0, old.text
        run.stop_and_compare(tmp_path)


def test_as_much_code_as_there_may_be_arrives_over_tls(there, tmp_path):
    (there / "train.py").write_text(ALONE)
    large = b"#" * (CODE_BYTES_MAX - len(ALONE))
    (there / "large.py").write_bytes(large)
    with coordinator(tmp_path, str(there / "train.py"), ship="large.py", nodes=0) as run:
        assert not run.ticket.is_clear
        with pytest.raises(w5xde.JoinError) as told:
            w5xde.join(run.ticket)
        assert told.value.code == "W5-285"
        sha256 = CodeBundle.of("train.py", {"train.py": ALONE.encode(), "large.py": large}).sha256
        assert sha256 in told.value.what


def test_a_notebook_asks_for_the_code_beside_its_own_loop(tmp_path):
    async def cell() -> None:
        w5xde.join(run.ticket, accept_code="0" * 64)

    with coordinator(tmp_path) as run:
        with pytest.raises(w5xde.JoinError) as told:
            asyncio.run(cell())
        assert told.value.code == "W5-285"
        run.stop()


def test_a_job_that_is_no_file_cannot_be_sent(tmp_path):
    with coordinator(tmp_path, jobs.slow) as run:  # type: ignore[arg-type]
        with pytest.raises(w5xde.JoinError) as told:
            w5xde.join(run.ticket)
        assert told.value.code == "W5-286"
        assert "is not a file that could be sent" in told.value.what
        run.stop()
