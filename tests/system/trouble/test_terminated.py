"""SIGTERM at any moment: a process ends in order, with exit code 75, within 20 s, and so do its children."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

import w5xde
from tests.processes import (
    HERE,
    JOBS,
    PATIENCE_SECONDS,
    ROOT,
    Process,
    command,
    coordinator,
    count_steps,
    events,
    family,
    forked,
    forked_nodes,
    wait_for_file,
    wait_for_quiet,
    wait_for_steps,
    wait_until,
)
from tests.sockets import clear_ticket
from w5xde.cli.main import main
from w5xde.errors import NOT_OVER
from w5xde.runtime.durable.audit import audit_run

BROKEN_JOBS = str(ROOT / "tests" / "system" / "broken_jobs.py")
# What engines and users are promised.
END_SECONDS = 20.0
FLAGS = ["--name", "mine", "--resume", "auto", "--batch-size", "10", "--batches-per-step", "2"]


@contextmanager
def ending(process: Process, status: int = NOT_OVER) -> Iterator[None]:
    """What is done here makes this process end in time; its children end too, frozen or not."""
    children = family(process.pid)
    begun = time.monotonic()
    yield
    assert process.wait() == status, process.text
    assert time.monotonic() - begun < END_SECONDS, process.text
    assert psutil.wait_procs(children, PATIENCE_SECONDS)[1] == []
    for word in ("Traceback", "error["):
        assert word not in process.text


def terminate(process: Process) -> None:
    """As engines do: more than once."""
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)


# --- a coordinator --------------------------------------------------------------------------------


@contextmanager
def training(*words: str, job: str = "stuck", **variables: str) -> Iterator[tuple[Process, Path]]:
    """A run with two local nodes that has made some steps, and its folder."""
    folder = Path.cwd() / "runs" / "mine"
    flags = [*FLAGS, "--nodes", "2", "--epochs", "9999", *words]
    with command("train", f"{JOBS}:{job}", *flags, **variables) as run:
        wait_for_steps(folder, 3)
        yield run, folder


def finish(folder: Path, steps: int) -> None:
    """The run that was told to end goes on by the same command, and comes to the undisturbed weights."""
    assert audit_run(folder).is_clean
    result = json.loads((folder / "manifest.json").read_text())["result"]
    assert (result["over"], result["reason"]) == (False, "terminated")
    assert result["weights_step"] == result["durable_steps"] == result["steps"]
    words = [*FLAGS, "--nodes", "1", "--steps", str(result["steps"] + steps), "--json"]
    assert main(["train", f"{JOBS}:stuck", *words]) == 0
    trained = json.loads((folder / "manifest.json").read_text())["result"]
    alone = w5xde.train(f"{JOBS}:job", nodes=1, batch_size=10, batches_per_step=2, steps=trained["steps"])
    assert trained["weights_sha256"] == alone.summary["weights_sha256"]
    assert audit_run(folder).is_clean


# Quick batches are computed on the event loop of a node, slow ones beside it.
@pytest.mark.parametrize("seconds", ["0", "0.2"])
def test_a_run_whose_batches_take_minutes(seconds: str, stuck: Path) -> None:
    with training(TEST_BATCH_SECONDS=seconds) as (run, folder):
        (stuck / "batch").touch()
        wait_for_quiet(folder)
        with ending(run):
            terminate(run)
    (stuck / "batch").unlink()
    finish(folder, 4)


def test_a_run_whose_nodes_are_frozen(stuck: Path) -> None:
    with training() as (run, folder), ending(run):
        for each in forked_nodes(run.pid):
            each.suspend()
        terminate(run)
    finish(folder, 4)


def test_a_run_whose_fork_server_is_frozen_too(stuck: Path) -> None:
    with training() as (run, folder), ending(run):
        for each in family(run.pid):
            each.suspend()
        terminate(run)
    finish(folder, 4)


def test_a_run_all_of_whose_processes_are_told(stuck: Path) -> None:
    with training("--loader-workers", "2") as (run, folder), ending(run):
        for each in (*family(run.pid), psutil.Process(run.pid)):
            each.send_signal(signal.SIGTERM)
    assert "has died" not in run.text
    finish(folder, 4)


def test_the_processes_of_a_run_do_not_end_by_themselves(stuck: Path) -> None:
    with training("--loader-workers", "2") as (run, folder):
        children = family(run.pid)
        for each in children:
            each.send_signal(signal.SIGTERM)
        wait_for_steps(folder, count_steps(folder) + 5)
        assert all(each.is_running() for each in children)
        with ending(run):
            terminate(run)


def test_a_run_with_an_evaluation_under_way(stuck: Path) -> None:
    with training(job="stuck_evaluated") as (run, folder):
        (stuck / "evaluation").touch()
        wait_for_file(stuck / "evaluating")
        with ending(run):
            terminate(run)
    assert audit_run(folder).is_clean


def test_a_run_whose_trained_model_is_being_evaluated_is_not_over(
    stuck: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*FLAGS, "--nodes", "1", "--steps", "3"]
    with command("train", f"{JOBS}:stuck_evaluated", *words) as run:
        # Not earlier: loss and evaluation are tried before the run begins.
        run.wait_for("listening on")
        (stuck / "batch").touch()
        (stuck / "evaluation").touch()
        (stuck / "batch").unlink()
        run.wait_for("training ended: all steps done")
        wait_for_file(stuck / "evaluating")
        with ending(run):
            terminate(run)
    (stuck / "evaluation").unlink()
    folder = Path.cwd() / "runs" / "mine"
    before = json.loads((folder / "manifest.json").read_text())["result"]
    assert (before["over"], before["steps"], before["metrics"]) == (False, 3, {})
    capfd.readouterr()
    assert main(["train", f"{JOBS}:stuck_evaluated", *words, "--json"]) == 0
    after = json.loads(capfd.readouterr().out)
    assert (after["over"], after["steps"], after["metrics"]) == (True, 3, {"parameters": 276.0})
    assert after["weights_sha256"] == before["weights_sha256"]
    assert audit_run(folder).is_clean


def test_a_run_that_writes_a_checkpoint(tmp_path: Path) -> None:
    words = ["--name", "mine", "--nodes", "1", "--batch-size", "8", "--batches-per-step", "1"]
    flags = [*words, "--steps", "9999", "--checkpoint-every", "1steps", "--log", "verbose"]
    # So slow that the run cannot be saved in time: what is on the disk must be whole.
    with command("train", f"{BROKEN_JOBS}:large", *flags, cwd=tmp_path, TEST_SYNC_SECONDS="30") as run:
        run.wait_for("epoch 2 is complete")
        with ending(run):
            terminate(run)
    assert "did not end in time" in run.text
    assert audit_run(tmp_path / "runs" / "mine").is_clean


def test_a_second_sigterm_does_not_hurry_an_end_in_order(stuck: Path) -> None:
    with training(TEST_BATCH_SECONDS="2") as (run, folder):
        done = count_steps(folder)
        with ending(run):
            for _ in range(20):
                run.send_signal(signal.SIGTERM)
                time.sleep(0.05)
    assert "stopped: " not in run.text
    assert json.loads((folder / "manifest.json").read_text())["result"]["steps"] >= done


def test_two_interrupts_after_sigterm_stop_now(stuck: Path) -> None:
    with training() as (run, _):
        (stuck / "batch").touch()
        run.send_signal(signal.SIGTERM)
        run.wait_for("told to end")
        run.interrupt()
        run.wait_for("once more stops now")
        begun = time.monotonic()
        run.interrupt()
        assert run.wait() == NOT_OVER, run.text
        assert time.monotonic() - begun < 3.0


def test_from_python_the_result_says_that_the_run_is_not_over(stuck: Path) -> None:
    def train() -> None:
        result = w5xde.train(f"{JOBS}:stuck_evaluated", nodes=2, epochs=9999, name="mine")
        print(f"over: {result.is_over}, {result.reason}", flush=True)

    with forked(train) as run:
        wait_for_steps(Path.cwd() / "runs" / "mine", 2)
        (stuck / "evaluation").touch()
        wait_for_file(stuck / "evaluating")
        with ending(run, status=0):
            run.send_signal(signal.SIGTERM)
    assert "over: False, terminated" in run.text


# --- nodes ----------------------------------------------------------------------------------------


@contextmanager
def joining(ticket: str, nodes: int, *words: str, **variables: str) -> Iterator[Process]:
    flags = ["--name", "guest", "--nodes", str(nodes), *words]
    with command("join", ticket, f"{JOBS}:stuck", *flags, **variables) as node:
        yield node


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seconds", ["0", "0.2"])
def test_a_node_that_computes_a_batch_of_minutes_gives_it_back(
    nodes: int, seconds: str, stuck: Path, tmp_path: Path
) -> None:
    with coordinator(tmp_path, nodes=0) as run:
        with joining(run.ticket.to_text(), nodes, TEST_BATCH_SECONDS=seconds) as node:
            names = {"guest", "guest-2"} if nodes == 2 else {"guest"}
            wait_until(lambda: names <= {each.get("node") for each in lent(run.folder)}, lambda: node.text)
            wait_for_steps(run.folder, 3)
            (stuck / "batch").touch()
            wait_for_quiet(run.folder)
            with ending(node):
                terminate(node)
        (stuck / "batch").unlink()
        done = run.step()
        with joining(run.ticket.to_text(), 1):
            run.wait_for_step(done + 2)
            result = run.stop()
    alone = {"nodes": 1, "batch_size": 6, "batches_per_step": 4, "steps": result["steps"]}
    again = w5xde.train(f"{JOBS}:job", runs=str(tmp_path), **alone)
    assert again.summary["weights_sha256"] == result["weights_sha256"]
    assert audit_run(run.folder).is_clean


def lent(folder: Path) -> list[dict[str, str]]:
    return [event for event in events(folder) if event["kind"] == "lend"]


def test_nodes_of_a_machine_that_are_frozen_are_not_waited_for(stuck: Path, tmp_path: Path) -> None:
    with coordinator(tmp_path, nodes=0) as run:
        with joining(run.ticket.to_text(), 2) as crew:
            wait_until(
                lambda: {"guest", "guest-2"} <= {each.get("node") for each in lent(run.folder)},
                lambda: crew.text,
            )
            with ending(crew):
                for each in forked_nodes(crew.pid):
                    each.suspend()
                terminate(crew)
        run.stop()


def test_all_processes_of_a_machine_are_told_at_once(stuck: Path, tmp_path: Path) -> None:
    with coordinator(tmp_path, nodes=0) as run:
        with joining(run.ticket.to_text(), 2) as crew:
            wait_for_steps(run.folder, 3)
            with ending(crew):
                for each in (*family(crew.pid), psutil.Process(crew.pid)):
                    each.send_signal(signal.SIGTERM)
        assert "left as asked" in crew.text
        run.process.wait_for("left (it said goodbye)")
        run.stop()


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_that_looks_for_its_coordinator(nodes: int, is_silent: bool, stuck: Path) -> None:
    with closing(socket.create_server((HERE, 0))) as server:
        server.settimeout(PATIENCE_SECONDS)
        ticket = clear_ticket(f"{HERE}:{server.getsockname()[1]}")
        with joining(ticket, nodes, "--wait", "600", "--road", "tcp") as node:
            connection, _ = server.accept()
            if not is_silent:
                # It tries again from now on.
                connection.close()
            with closing(connection), ending(node):
                terminate(node)


# --- the first moments ----------------------------------------------------------------------------


def hears_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM."""
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def has_mapped(pid: int, library: str) -> bool:
    return library in (Path("/proc") / str(pid) / "maps").read_text()


@pytest.mark.parametrize("library", ["", "_multiarray_umath", "libtorch_cpu", "libtorch_python"])
@pytest.mark.parametrize("words", [["train", f"{JOBS}:job"], ["join", "@ticket", f"{JOBS}:job"]])
def test_a_command_that_is_being_loaded_can_be_tried_again(
    words: list[str], library: str, tmp_path: Path
) -> None:
    (tmp_path / "ticket").write_text(clear_ticket("127.0.0.1:1"))
    with command(*words, "--name", "mine", cwd=tmp_path, is_fresh=True) as run:
        wait_until(lambda: hears_sigterm(run.pid), lambda: run.text)
        wait_until(lambda: not library or has_mapped(run.pid, library), lambda: run.text)
        with ending(run):
            terminate(run)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())
