"""Engines, as far as no cluster is needed: the commands that they mind, what follows their end, refusals."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest

import w5xde
from tests.processes import JOBS, run_python, wait_for_file, wait_until
from tests.system import jobs
from w5xde.cli.main import main
from w5xde.cli.parser import build_parser
from w5xde.engines.minded import Ended, MindedCommand
from w5xde.engines.restarts import KILLED_MAX, LONG_LIFE_SECONDS, Next, Restarts
from w5xde.engines.start import result_of
from w5xde.engines.told import error_of
from w5xde.engines.words import join_words, passed_on, serve_words
from w5xde.errors import JobError, TrainingError, UsageError, W5xdeError

# --- the words of commands ------------------------------------------------------------------------


def test_what_was_typed_for_train_is_typed_for_serve_and_join() -> None:
    typed = ["train", "job.py", "--engine", "ray", "--nodes", "2..4", "--batch-size", "7", "--mode", "async"]
    typed += ["--name", "x", "--resume", "auto", "--no-shuffle", "--verify", "0.5", "--devices", "cpu"]
    given = vars(build_parser().parse_args(typed))
    arguments = {
        key: given[key] for key in given if key not in ("command", "job", "help_all", "print_config")
    }
    served = vars(build_parser().parse_args(["serve", "job.py", *serve_words(arguments)]))
    found = {key: value for key, value in served.items() if value not in (None, False)}
    assert found.pop("command") == "serve"
    assert found.pop("job") == "job.py"
    assert served["shuffle"] is False
    assert found == {
        "batch_size": "7",
        "mode": "async",
        "verify": "0.5",
        "devices": "cpu",
        "host": "0.0.0.0",
        "port": "0",
    }
    assert join_words(arguments) == ["--devices=cpu"]


def test_variables_that_are_settings_travel_and_secrets_do_not() -> None:
    found = passed_on(
        {
            "W5XDE_BATCH_SIZE": "3",
            "W5XDE_TICKET": "secret",
            "W5XDE_STATE": "/here",
            "W5XDE_NODES": "2..4",
            "W5XDE_ENGINE": "ray",
            "HOME": "/root",
        }
    )
    assert found == {"W5XDE_BATCH_SIZE": "3"}


# --- a command that is minded -----------------------------------------------------------------------


def minded(*words: str, folder: Path, said: list[str]) -> MindedCommand:
    return MindedCommand(words, folder, {"TEST_BATCH_SECONDS": "0.05"}, said.append, time.monotonic)


def test_a_minded_command_is_heard_and_leaves_politely(tmp_path: Path) -> None:
    said: list[str] = []
    words = ["serve", f"{JOBS}:slow", "--name", "mine", "--nodes", "1", "--port", "0", "--json"]
    command = minded(*words, "--epochs", "9999", folder=tmp_path, said=said)
    ended: list[Ended] = []
    thread = threading.Thread(target=lambda: ended.append(command.run()))
    thread.start()
    metrics = wait_for_file(tmp_path / "runs" / "mine" / "metrics.jsonl")
    wait_until(lambda: '"step"' in metrics.read_text(), lambda: "\n".join(said))
    command.leave()
    thread.join()
    assert ended[0].status == 75
    assert any("listening on" in line for line in said)
    assert json.loads((tmp_path / "runs" / "mine" / "manifest.json").read_text())["result"]["over"] is False
    # One that was told to leave does not begin again.
    assert command.run().status == -signal.SIGTERM


def test_the_error_of_a_minded_command_is_raised_again_with_its_exit_code(tmp_path: Path) -> None:
    ended = minded("serve", "nowhere.py", folder=tmp_path, said=[]).run()
    error = error_of(ended, "the coordinator")
    assert isinstance(error, JobError)
    assert (error.exit_code, error.code, error.what) == (20, "W5-206", "there is no job file nowhere.py")
    assert error.fix == "give the path of a Python file that makes a w5xde.Job"


def test_a_command_that_said_nothing_is_told_with_its_last_words() -> None:
    error = error_of(Ended(-9, ("one", "two")), "the coordinator")
    assert error.code == "W5-608"
    assert error.what == "the coordinator was killed by signal 9, again and again"
    assert error.why == "one | two"


def test_the_error_of_a_training_has_its_summary() -> None:
    ended = Ended(30, ("error[W5-311]: the loss is nan", "  fix: lower the learning rate"))
    error = error_of(ended, "the coordinator", {"steps": 3})
    assert isinstance(error, TrainingError)
    assert error.summary == {"steps": 3}


# --- what follows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "line", "then"),
    [
        (0, "", Next.OVER),
        (75, "", Next.AGAIN),
        (-9, "", Next.AGAIN),
        (2, "error[W5-210]: no", Next.FAILED),
        (20, "error[W5-206]: no", Next.FAILED),
        (10, "error[W5-114]: banned", Next.FAILED),
        (10, "error[W5-105]: used up", Next.AGAIN),
        (30, "error[W5-302]: no memory", Next.AGAIN),
        (30, "error[W5-311]: nan", Next.FAILED),
    ],
)
def test_what_follows_the_end_of_a_command(status: int, line: str, then: Next) -> None:
    assert Restarts().after(Ended(status, (line,))).next is then


def test_pauses_grow_with_short_lives_and_begin_anew_after_a_long_one() -> None:
    restarts = Restarts()
    pauses = [restarts.after(Ended(75)).pause_seconds for _ in range(9)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert restarts.after(Ended(75, seconds=LONG_LIFE_SECONDS + 1)).pause_seconds == 0.0


def test_a_command_that_is_killed_again_and_again_is_given_up() -> None:
    restarts = Restarts()
    found = [restarts.after(Ended(-9)).next for _ in range(KILLED_MAX)]
    assert found == [Next.AGAIN] * (KILLED_MAX - 1) + [Next.FAILED]
    again = Restarts()
    assert {again.after(Ended(75)).next for _ in range(100)} == {Next.AGAIN}


# --- refusals ---------------------------------------------------------------------------------------

WITHOUT_RAY = "import sys; sys.modules['ray'] = None; from w5xde.cli.main import main; sys.exit(main({}))"


def test_without_ray_the_error_has_the_line_that_installs_it(tmp_path: Path) -> None:
    words = ["train", f"{JOBS}:job", "--engine", "ray", "--runs", str(tmp_path)]
    done = run_python("-c", WITHOUT_RAY.format(words))
    assert done.returncode == 2
    assert "error[W5-600]" in done.stderr
    assert "fix: pip install 'w5xde[ray]'" in done.stderr


def test_a_job_file_that_does_not_exist_is_refused_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.py", "--engine", "ray"]) == 20
    assert "error[W5-206]" in capsys.readouterr().err


def test_a_name_that_is_taken_is_refused_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    words = ["train", f"{JOBS}:job", "--engine", "ray", "--runs", str(tmp_path), "--name", "mine"]
    assert main(words) == 40
    assert "error[W5-403]" in capsys.readouterr().err


def test_a_ticket_file_is_refused_with_where_the_ticket_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"{JOBS}:job", "--engine", "ray", "--ticket-file", "ticket"]) == 2
    assert "RUNS/.identity/RUN/ticket" in capsys.readouterr().err


def test_a_job_without_a_file_cannot_be_started_elsewhere() -> None:
    made = w5xde.Job(model=jobs.model, data=jobs.data, loss=jobs.loss, optimizer=jobs.optimizer)
    with pytest.raises(JobError, match="this job is in no file") as caught:
        w5xde.train(made, engine="ray")
    assert caught.value.code == "W5-609"


def test_callbacks_cannot_be_given_to_a_run_elsewhere() -> None:
    with pytest.raises(UsageError, match="callbacks") as caught:
        w5xde.train(f"{JOBS}:job", engine="ray", callbacks=[w5xde.SaveBest("loss")])
    assert caught.value.code == "W5-610"


def test_a_run_without_a_result_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"settings": {}}')
    with pytest.raises(W5xdeError, match="has no result of this run") as caught:
        result_of(tmp_path)
    assert caught.value.code == "W5-607"
