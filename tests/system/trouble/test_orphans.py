"""No process outlives the one that it works for, however that ends; with --with-parent, nor its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import w5xde
from tests.processes import (
    JOBS,
    PATIENCE_SECONDS,
    Process,
    command,
    coordinator,
    count_steps,
    environment,
    events,
    family,
    forked,
    forked_nodes,
    wait_for_quiet,
    wait_for_steps,
    wait_until,
)
from w5xde.cli.main import main
from w5xde.runtime.durable.audit import audit_run
from w5xde.runtime.system.parent import ending_with_parent

FLAGS = ["--name", "mine", "--resume", "auto", "--batch-size", "10", "--batches-per-step", "2"]
# A process that starts a command, says which, and waits: what an engine's wrapper does.
WRAPPER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "w5xde", *sys.argv[2:]])
with open(sys.argv[1], "w") as file:
    file.write(f"{child.pid}\\n")
time.sleep(600)
"""


def require_gone(processes: list[psutil.Process]) -> None:
    try:
        assert psutil.wait_procs(processes, PATIENCE_SECONDS)[1] == []
    finally:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@contextmanager
def wrapped(
    folder: Path, *words: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A wrapper with a command as its child: the wrapper, the child's process id, and the child's output."""
    file, output = folder / "pid", folder / "output"
    with output.open("wb") as printed:
        wrapper = subprocess.Popen(
            [sys.executable, "-c", WRAPPER, str(file), *words],
            stdout=printed,
            stderr=printed,
            env=environment(**variables),
        )
    child = 0
    try:
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), output.read_text)
        child = int(file.read_text())
        yield wrapper, child, output
    finally:
        wrapper.kill()
        wrapper.wait()
        with suppress(psutil.NoSuchProcess):
            require_gone([*family(child), psutil.Process(child)])


def is_in_second_epoch(folder: Path) -> bool:
    kinds = [event["kind"] for event in events(folder)]
    return "epoch" in kinds and "step" in kinds[kinds.index("epoch") :]


# --- a parent that is killed ----------------------------------------------------------------------


@pytest.mark.parametrize("way", ["--with-parent", "W5XDE_WITH_PARENT"])
def test_a_coordinator_ends_in_order_when_its_wrapper_is_killed(
    way: str, stuck: Path, tmp_path: Path
) -> None:
    words = ["train", f"{JOBS}:stuck", *FLAGS, "--nodes", "2", "--epochs", "9999"]
    flags, variables = ([way], {}) if way.startswith("--") else ([], {way: "true"})
    folder = tmp_path / "runs" / "mine"
    # Also when the run goes on: it is a setting of the process, not of the run.
    for life in (1, 2):
        with wrapped(tmp_path, *words, *flags, **variables) as (wrapper, child, output):
            wait_until(lambda life=life: starts(folder) == life, output.read_text)  # type: ignore[misc]
            wait_for_steps(folder, 5 * life)
            if life == 2:
                # So that at least two epochs are begun, however slow this machine is.
                wait_until(lambda: is_in_second_epoch(folder), output.read_text)
            everybody = [psutil.Process(child), *family(child)]
            wrapper.kill()
            require_gone(everybody)
        result = json.loads((folder / "manifest.json").read_text())["result"]
        assert (result["over"], result["reason"]) == (False, "terminated")
        (tmp_path / "pid").unlink()
    assert audit_run(folder).is_clean
    assert main([*words, "--epochs", "1"]) == 2, "that many epochs are done already"


def starts(folder: Path) -> int:
    return sum(event["kind"] == "start" for event in events(folder))


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_gives_back_what_it_computes_when_its_wrapper_is_killed(
    nodes: int, stuck: Path, tmp_path: Path
) -> None:
    with coordinator(tmp_path, nodes=0) as run:
        words = ["join", run.ticket.to_text(), f"{JOBS}:stuck", "--nodes", str(nodes), "--with-parent"]
        with wrapped(tmp_path, *words) as (wrapper, child, _):
            wait_for_steps(run.folder, 2)
            (stuck / "batch").touch()
            everybody = [psutil.Process(child), *family(child)]
            wrapper.kill()
            require_gone(everybody)
        run.wait_until_recorded("it said goodbye")
        run.stop()


def test_a_command_without_it_goes_on_alone(stuck: Path, tmp_path: Path) -> None:
    words = ["train", f"{JOBS}:stuck", *FLAGS, "--nodes", "1", "--epochs", "9999"]
    folder = tmp_path / "runs" / "mine"
    with wrapped(tmp_path, *words) as (wrapper, child, _):
        wait_for_steps(folder, 2)
        wrapper.kill()
        wrapper.wait()
        wait_for_steps(folder, count_steps(folder) + 5)
        everybody = [psutil.Process(child), *family(child)]
        os.kill(child, signal.SIGTERM)
        require_gone(everybody)


def test_a_parent_that_died_before_anybody_looked_is_noticed(tmp_path: Path) -> None:
    def work() -> None:
        with ending_with_parent(True, parent=1_000_000_000):
            time.sleep(PATIENCE_SECONDS)

    with forked(work) as process:
        assert process.wait() == -signal.SIGTERM


def test_python_ends_with_its_parent_only_while_it_trains(tmp_path: Path) -> None:
    settings = {"nodes": 1, "steps": 2, "runs": str(tmp_path), "with_parent": True}
    script = (
        "import os, sys, time, w5xde\n"
        f"result = w5xde.train({f'{JOBS}:job'!r}, progress=False, **{settings!r})\n"
        "print('trained', result.is_over, flush=True)\n"
        "while os.getppid() == int(sys.argv[1]):\n"
        "    time.sleep(0.05)\n"
        "time.sleep(2)\n"
        f"open({str(tmp_path / 'alone')!r}, 'w').write('alone')\n"
    )

    def parent() -> None:
        subprocess.Popen([sys.executable, "-c", script, str(os.getpid())])
        time.sleep(PATIENCE_SECONDS)

    with forked(parent) as process:
        process.wait_for("trained True")
        (child,) = family(process.pid)
        process.kill()
        require_gone([child])
    assert (tmp_path / "alone").exists()


# --- the processes of a command that is killed ----------------------------------------------------


@contextmanager
def training(*words: str) -> Iterator[tuple[Process, Path]]:
    flags = [*FLAGS, "--nodes", "2", "--epochs", "9999", *words]
    folder = Path.cwd() / "runs" / "mine"
    with command("train", f"{JOBS}:stuck", *flags) as run:
        wait_for_steps(folder, 3)
        yield run, folder


def kill(process: Process) -> None:
    children = family(process.pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    require_gone(children)


@pytest.mark.parametrize("what", ["nothing", "batch", "sample"])
def test_nothing_of_a_coordinator_that_is_killed_lives_on(what: str, stuck: Path) -> None:
    with training("--loader-workers", "2") as (run, folder):
        (stuck / what).touch()
        if what != "nothing":
            wait_for_quiet(folder)
        kill(run)


def guard_and_server(processes: list[psutil.Process]) -> list[psutil.Process]:
    parents = {each.ppid() for each in processes}
    return [each for each in processes if each.pid in parents]


@pytest.mark.parametrize("trouble", ["frozen nodes", "killed fork server"])
def test_nothing_lives_on_of_a_coordinator_that_is_killed_in_trouble(trouble: str, stuck: Path) -> None:
    # Computed on the event loops of the nodes, which then cannot look for their parent.
    with training() as (run, folder):
        (stuck / "batch").touch()
        wait_for_quiet(folder)
        children = family(run.pid)
        run.send_signal(signal.SIGSTOP)
        for each in forked_nodes(run.pid) if trouble == "frozen nodes" else guard_and_server(children):
            each.suspend() if trouble == "frozen nodes" else each.kill()
        run.kill()
        assert run.wait() == -signal.SIGKILL
        require_gone(children)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("what", ["batch", "sample"])
def test_nothing_of_a_join_that_is_killed_lives_on(
    nodes: int, what: str, stuck: Path, tmp_path: Path
) -> None:
    flags = ["--nodes", str(nodes), "--loader-workers", "2"]
    with coordinator(tmp_path, job=f"{JOBS}:stuck", nodes=0, data="local") as run:
        with command("join", run.ticket.to_text(), f"{JOBS}:stuck", *flags) as node:
            wait_for_steps(run.folder, 3)
            # The nodes have their reading processes, or will have them.
            wait_until(lambda: len(family(node.pid)) >= 2 * nodes + 2 * (nodes > 1), lambda: node.text)
            (stuck / what).touch()
            kill(node)
        (stuck / what).unlink()
        run.stop()


def test_a_run_from_python_leaves_nothing_behind_either(stuck: Path, tmp_path: Path) -> None:
    def train() -> None:
        w5xde.train(f"{JOBS}:stuck", nodes=2, epochs=9999, name="mine", loader_workers=2)

    with forked(train) as run:
        wait_for_steps(tmp_path / "runs" / "mine", 3)
        kill(run)
