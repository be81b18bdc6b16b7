"""What is kept and shown: troubles of disks and terminals do not reach the training."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from w5xde.cli.view import View, duration_text
from w5xde.config import Settings
from w5xde.errors import StorageError
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.sanitize import to_json
from w5xde.ticket import Secret, Ticket, join_line


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """The system refuses every byte that would make a file longer, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_of_metrics_that_cannot_grow_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    recorder = RunFolder(Settings(runs=str(tmp_path)), "job")
    recorder.watch(told.append)
    with no_file_may_grow():
        recorder.metrics({"step": 1})
        recorder.metrics({"step": 2})
    assert told == [f"metrics.jsonl cannot be written: {os.strerror(errno.EFBIG)}; training goes on"]
    recorder.close()


def test_a_model_that_cannot_be_saved_is_told_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RunFolder(Settings(runs=str(tmp_path)), "job")

    def write(name: str, pieces: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder.disk, "write", write)
    with pytest.raises(StorageError, match="cannot be saved"):
        recorder.save_model([b"weights"], lambda sha256: None)
    recorder.close()


def test_what_is_not_a_number_is_null_for_every_reader_of_json() -> None:
    assert json.loads(to_json({"a": float("nan"), "b": [float("inf")], "c": 1.5})) == {
        "a": None,
        "b": [None],
        "c": 1.5,
    }


def test_others_words_are_shown_as_they_are() -> None:
    out = io.StringIO()
    View(Settings(), out).say("left (bad tag [/nope] [red]here[/red] :smile:)")
    assert out.getvalue() == "left (bad tag [/nope] [red]here[/red] :smile:)\n"


def test_a_closed_terminal_silences_the_view_and_nothing_else() -> None:
    tried: list[str] = []

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise BrokenPipeError

    view = View(Settings(), Closed())
    view.say("hello")
    assert tried
    tried.clear()
    view.say("hello")
    assert tried == []


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.25, "1.2 s"), (61, "1:01"), (3600, "1:00:00"), (90000, "25:00:00")]
)
def test_times_are_shown_as_people_read_them(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown


def test_a_join_line_can_be_pasted_whatever_the_job_is_called() -> None:
    ticket = Ticket((("::1", 5),), b"", bytes(8), Secret(bytes(16)), is_clear=True)
    assert join_line(ticket, "my jobs/train.py") == f"w5xde join {ticket.to_text()} 'my jobs/train.py'"
    assert shlex.split(join_line(ticket, "train.py"))[3] == "train.py"
