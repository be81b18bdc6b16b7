"""`--resume auto`: one command begins a run, goes on with it, and ends at once when the run is complete."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import w5xde
from tests.processes import HERE, JOBS, AtStep, command, events, forked, run_python
from w5xde.cli.main import main
from w5xde.errors import NOT_OVER
from w5xde.learn.model.digest import weights_sha256
from w5xde.runtime.durable import again
from w5xde.runtime.durable.audit import audit_run
from w5xde.runtime.durable.lock import RunLock
from w5xde.runtime.durable.run_folder import RunFolder

FLAGS = ["--batches-per-step", "2", "--epochs", "6", "--seed", "3", "--checkpoint-every", "3steps"]
SETTINGS: dict[str, Any] = {"batches_per_step": 2, "epochs": 6, "seed": 3, "checkpoint_every": "3steps"}
AGAIN = ["--name", "mine", "--resume", "auto", "--nodes", "2", *FLAGS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    result = w5xde.train(f"{JOBS}:job", nodes=1, runs=str(tmp_path_factory.mktemp("runs")), **SETTINGS)
    return str(result.summary["weights_sha256"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run will be; the test is in the folder in which its user would be."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "mine"


def run(*words: str) -> int:
    return main(["train", f"{JOBS}:job", *AGAIN, *words])


def test_the_same_command_is_right_three_times(
    undisturbed: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", f"{JOBS}:slow", *AGAIN, "--json"]
    with command(*words, "--log", "verbose", TEST_BATCH_SECONDS="0.08") as first:
        first.wait_for("epoch 2 is complete")
        first.kill_with_children()
        assert first.wait() == -signal.SIGKILL
    with command(*words, TEST_BATCH_SECONDS="0") as second:
        assert second.wait() == 0, second.text
    assert "goes on from step" in second.text
    summary = json.loads(second.text.splitlines()[-1])
    assert (summary["weights_sha256"], summary["over"]) == (undisturbed, True)
    before = events(folder)
    manifest = (folder / "manifest.json").read_bytes()
    assert main(words) == 0
    told = capfd.readouterr()
    assert json.loads(told.out) == summary
    assert "run mine is complete: nothing is left to do" in told.err
    assert events(folder) == before
    assert (folder / "manifest.json").read_bytes() == manifest
    assert main(words[:-1]) == 0
    assert undisturbed[:16] in capfd.readouterr().out
    report = audit_run(folder)
    assert (report.is_clean, report.summary()["lives"], report.summary()["crashes"]) == (True, 2, 1)


def test_a_complete_run_loads_no_torch_to_say_so(folder: Path) -> None:
    assert run() == 0
    script = (
        "import sys; from w5xde.cli.main import main;"
        f" status = main(['train', {f'{JOBS}:job'!r}, *{AGAIN!r}, '--json']);"
        " assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = run_python("-c", script, cwd=folder.parents[1])
    assert done.returncode == 0, done.stderr


def test_python_says_the_same(undisturbed: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"name": "mine", "resume": "auto", "runs": str(tmp_path), "nodes": 2, **SETTINGS}
    killer = AtStep({9: lambda status: os.kill(os.getpid(), signal.SIGKILL)})
    with forked(lambda: w5xde.train(f"{JOBS}:job", callbacks=[killer], **more)) as child:
        assert child.wait() == -signal.SIGKILL
    second, third = (w5xde.train(f"{JOBS}:job", **more) for _ in range(2))
    for result in (second, third):
        assert result.is_over
        assert result.summary["weights_sha256"] == undisturbed == weights_sha256(result.model)
        assert result.folder == tmp_path / "mine"
        assert result.reason == "all steps done"
    assert second.summary == third.summary
    assert repr(second).partition(".ticket")[0] == repr(third).partition(".ticket")[0]
    assert audit_run(tmp_path / "mine").summary()["lives"] == 2


def test_python_refuses_a_job_that_is_not_that_of_the_complete_run(tmp_path: Path) -> None:
    more: dict[str, Any] = {"name": "mine", "resume": "auto", "runs": str(tmp_path), "nodes": 1, "steps": 2}
    w5xde.train(f"{JOBS}:job", **more)
    with pytest.raises(w5xde.StorageError, match="the saved model does not fit the job") as refused:
        w5xde.train(f"{JOBS}:other", **more)
    assert refused.value.code == "W5-405"


def test_a_complete_run_goes_on_only_if_more_is_asked_of_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--epochs", "2") == 0
    for words, epochs, lives in (
        (["--epochs", "2"], 2, 1),
        (["--epochs", "1"], 2, 1),
        (["--epochs", "2", "--steps", "9999"], 2, 1),
        (["--epochs", "3"], 3, 2),
        # That is what the run has now.
        (["--epochs", "3"], 3, 2),
    ):
        capfd.readouterr()
        assert run(*words, "--json") == 0
        assert json.loads(capfd.readouterr().out)["epochs"] == epochs
        assert audit_run(folder).summary()["lives"] == lives
    # What was trained is there, but not the file: the run makes it again.
    (folder / "model.safetensors").unlink()
    assert run("--epochs", "3") == 0
    assert (folder / "model.safetensors").exists()


def test_what_a_run_has_is_no_contradiction_and_what_it_has_not_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("W5XDE_CLIP_NORM", "5")
    (folder.parents[1] / "w5xde.toml").write_text('batch-size = 20\nname = "mine"\n')
    given = [
        "train",
        f"{JOBS}:job",
        "--resume",
        "auto",
        "--steps",
        "4",
        "--nodes",
        "1",
        "--precision",
        "fp32",
    ]
    assert main(given) == 0
    assert main([*given, "--steps", "6"]) == 0
    for words, variables, told in (
        (["--seed", "4"], {}, "seed is 0 in run mine, not 4"),
        (["--mode", "async"], {}, "mode is sync in run mine, not async"),
        ([], {"W5XDE_CLIP_NORM": "6"}, "clip-norm is 5.0 in run mine, not 6.0"),
    ):
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert main([*given, "--steps", "6", *words]) == 2
        shown = capfd.readouterr().err
        assert "W5-211" in shown
        assert told in shown
    assert main([*given, "--steps", "6", "--print-config"]) == 0
    shown = capfd.readouterr().out
    assert ["clip-norm", "5.0", "W5XDE_CLIP_NORM"] in [line.split() for line in shown.splitlines()]
    assert ["steps", "6", "given"] in [line.split() for line in shown.splitlines()]
    assert ["keep-checkpoints", "3", "run", "mine"] in [line.split() for line in shown.splitlines()]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--resume", "auto"], "W5-245", "add --name"),
        (["--resume", "auto", "--name", "auto"], "W5-245", "add --name"),
        (["--resume", "auto", "--name", "mine", "--override", "lr=x0.1"], "W5-246", "--resume mine"),
        (["--resume", "auto", "--name", "mine", "--new-identity"], "W5-246", "--resume mine"),
    ],
)
def test_what_cannot_be_right_every_time_is_refused(
    words: list[str], code: str, told: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"{JOBS}:job", *words]) == 2
    shown = capfd.readouterr().err
    assert f"error[{code}]" in shown
    assert told in shown
    assert not folder.parent.exists()


def test_without_a_job_only_a_run_that_exists_goes_on(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *AGAIN]) == 2
    assert "which job?" in capfd.readouterr().err
    assert run("--epochs", "1") == 0
    assert main(["train", *AGAIN, "--epochs", "2"]) == 0


# --- folders in which nothing began ---------------------------------------------------------------


def test_a_start_that_was_killed_before_the_run_began_is_begun_anew(folder: Path) -> None:
    job = folder.parents[1] / "job.py"
    job.write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    words = ["train", str(job), *AGAIN, "--epochs", "1"]
    with command(*words) as killed:
        killed.wait_for("loading")
        killed.kill()
    assert [path.name for path in folder.iterdir()] == ["lock"]
    # What a start leaves behind that is killed between the ledger and the manifest.
    (folder / "ledger-000001.jsonl").write_text("{}\n")
    (folder / "manifest.json.tmp").touch()
    (folder / "metrics.jsonl").touch()
    (folder / "tickets.json").write_text("{}")
    (folder / ".tickets.json.new").touch()
    (folder / "checkpoints").mkdir()
    job.write_text("from tests.system.jobs import job\n")
    assert main(words) == 0
    report = audit_run(folder)
    assert (report.is_clean, report.summary()["lives"]) == (True, 1)


def test_a_start_that_was_killed_before_its_first_manifest_is_begun_anew(
    undisturbed: str, folder: Path
) -> None:
    more: dict[str, Any] = {"name": "mine", "resume": "auto", "nodes": 2, **SETTINGS}

    def killed() -> None:
        def die(self: RunFolder, facts: dict[str, Any]) -> bool:
            os.kill(os.getpid(), signal.SIGKILL)
            return False

        RunFolder.manifest = die  # type: ignore[method-assign]
        w5xde.train(f"{JOBS}:job", **more)

    with forked(killed) as child:
        assert child.wait() == -signal.SIGKILL
    assert (folder / "ledger-000001.jsonl").exists()
    assert not (folder / "manifest.json").exists()
    assert w5xde.train(f"{JOBS}:job", **more).summary["weights_sha256"] == undisturbed
    report = audit_run(folder)
    assert (report.is_clean, report.summary()["lives"]) == (True, 1)


def test_a_start_that_fails_or_is_told_to_end_leaves_no_folder(folder: Path) -> None:
    assert main(["train", "nowhere.py", *AGAIN]) == 20
    assert not folder.exists()
    (folder.parents[1] / "long.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(600)\n")
    with command("train", "long.py", *AGAIN) as told:
        told.wait_for("loading")
        told.send_signal(signal.SIGTERM)
        assert told.wait() == NOT_OVER, told.text
    assert not folder.exists()


@pytest.mark.parametrize(
    "foreign", ["notes.txt", ".bashrc", "checkpoints/step-000000003", "model.safetensors"]
)
def test_a_folder_with_anything_else_is_left_alone(
    foreign: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / foreign).parent.mkdir(parents=True)
    (folder / foreign).write_text("precious")
    assert run() == 40
    assert "error[W5-415]" in capfd.readouterr().err
    assert (folder / foreign).read_text() == "precious"


def test_a_folder_that_cannot_be_used_is_named(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "lock").mkdir(parents=True)
    assert run() == 40
    assert "error[W5-404]: the run folder runs/mine cannot be used" in capfd.readouterr().err
    folder.parent.rename("elsewhere")
    Path("runs").write_text("a file")
    assert run() == 40
    assert "error[W5-404]: the run folder runs/mine cannot be made" in capfd.readouterr().err


def test_a_ledger_of_a_run_that_trained_is_left_alone(folder: Path) -> None:
    assert run("--epochs", "1", "--checkpoint-every", "off") == 0
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors").unlink()
    before = (folder / "ledger-000001.jsonl").read_bytes()
    assert run() == 40
    assert (folder / "ledger-000001.jsonl").read_bytes() == before


def test_a_damaged_manifest_is_an_error_and_no_new_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--epochs", "1") == 0
    (folder / "manifest.json").write_text("{")
    assert run("--epochs", "2") == 40
    assert "error[W5-401]" in capfd.readouterr().err
    assert (folder / "manifest.json").read_text() == "{"


# --- a run that another process has ---------------------------------------------------------------


def test_a_run_that_stays_in_use_is_to_be_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--epochs", "1") == 0
    monkeypatch.setattr(again, "WAIT_SECONDS", 0.5)
    lock = RunLock(folder)
    try:
        assert run("--epochs", "2") == NOT_OVER
        told = capfd.readouterr().err
        assert f"run mine is in use by process {os.getpid()} on " in told
        assert "waiting up to" in told
        assert "error[W5-416]" in told
        # A run that is complete needs no lock.
        assert run("--epochs", "1") == 0
    finally:
        lock.release()
    assert audit_run(folder).summary()["lives"] == 1


def test_a_coordinator_waits_for_one_that_is_about_to_end(
    undisturbed: str, folder: Path, stuck: Path
) -> None:
    words = ["train", f"{JOBS}:stuck", *AGAIN]
    with command(*words) as old:
        # Not earlier: the loss is tried before the run begins.
        old.wait_for("listening on")
        (stuck / "batch").touch()
        with command(*words) as new:
            new.wait_for("waiting up to 30 s for it to end")
            old.send_signal(signal.SIGTERM)
            assert old.wait() == NOT_OVER, old.text
            (stuck / "batch").unlink()
            assert new.wait() == 0, new.text
    result = json.loads((folder / "manifest.json").read_text())["result"]
    assert result["weights_sha256"] == undisturbed
    assert audit_run(folder).is_clean


def test_one_that_waits_for_a_run_that_is_trained_to_its_end_has_nothing_to_do(
    folder: Path, stuck: Path
) -> None:
    words = ["train", f"{JOBS}:stuck", *AGAIN, "--epochs", "2"]
    with command(*words) as old:
        old.wait_for("listening on")
        (stuck / "batch").touch()
        with command(*words) as new:
            new.wait_for("waiting up to 30 s for it to end")
            (stuck / "batch").unlink()
            assert old.wait() == 0, old.text
            assert new.wait() == 0, new.text
    assert "run mine is complete" in new.text
    assert audit_run(folder).summary()["lives"] == 1


def test_a_lock_that_its_holder_removes_with_its_folder_is_not_taken_for_ours(folder: Path) -> None:
    folder.mkdir(parents=True)
    first = RunLock(folder)
    claim = again.RunClaim(lock=first)

    def wait_and_lock() -> None:
        lock = again.wait_for_lock(folder, lambda text: print(text, flush=True))
        assert (folder / "lock").exists()
        print("locked", flush=True)
        lock.release()

    with forked(wait_and_lock) as waiting:
        waiting.wait_for("waiting up to")
        claim.close()
        waiting.wait_for("locked")
        assert waiting.wait() == 0, waiting.text


# --- the port -------------------------------------------------------------------------------------


def test_a_run_keeps_its_port_or_takes_another_one_and_says_so(folder: Path) -> None:
    words = ["serve", f"{JOBS}:slow", *AGAIN, "--epochs", "9999"]
    port = free_port()

    def serve(*more: str) -> tuple[int, str]:
        with command(*words, *more) as served:
            address = served.wait_for("listening on").split()[2]
            # By then the run has noted what became of its port.
            served.wait_for("local-1 joined")
            served.send_signal(signal.SIGTERM)
            assert served.wait() == NOT_OVER, served.text
        return int(address.rpartition(":")[2]), served.text

    assert serve("--port", str(port))[0] == port
    assert serve()[0] == port
    with closing(socket.create_server((HERE, port))):
        other, text = serve()
        assert other != port
        assert f"port {port} is taken" in text
        with command(*words, "--port", str(port)) as refused:
            assert refused.wait() == 2
        assert "W5-110" in refused.text
    assert serve()[0] == other
    assert audit_run(folder).is_clean


def free_port() -> int:
    with closing(socket.create_server((HERE, 0))) as server:
        port: int = server.getsockname()[1]
        return port


def test_two_starts_at_once_train_one_run(undisturbed: str, folder: Path) -> None:
    words = ["train", f"{JOBS}:slow", *AGAIN]
    with command(*words, TEST_BATCH_SECONDS="0.01") as one, command(*words, TEST_BATCH_SECONDS="0.01") as two:
        # One trains; the other finds the run complete or, if that takes long, is to be tried again.
        assert sorted([one.wait(), two.wait()]) in ([0, 0], [0, NOT_OVER]), one.text + two.text
    result = json.loads((folder / "manifest.json").read_text())["result"]
    assert result["weights_sha256"] == undisturbed
    assert audit_run(folder).summary()["lives"] == 1
