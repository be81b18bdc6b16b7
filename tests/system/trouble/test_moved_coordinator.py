"""A coordinator that is restarted elsewhere: nodes find it by the ticket's file, or by a function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import w5xde
from tests.processes import JOBS, Process, command, forked, wait_for_file, wait_until
from tests.sockets import free_port
from tests.system.jobs import job as small_job
from w5xde.errors import JoinError
from w5xde.runtime.admission.register import TicketRegister
from w5xde.runtime.durable.audit import audit_run
from w5xde.ticket import parse

STEPS = 60


@contextmanager
def served(folder: Path, *words: str, state: str = "first") -> Iterator[Process]:
    """A coordinator without nodes of its own, on a machine of its own: with another state folder."""
    every = ["serve", "--runs", str(folder / "runs"), "--road", "tcp", *words]
    variables = {"W5XDE_STATE": str(folder / state), "TEST_HURRY_FILE": str(folder / "hurry")}
    with command(*every, cwd=folder, **variables) as process:
        yield process


@contextmanager
def joined(folder: Path, *words: str, ticket: str = "@ticket") -> Iterator[Process]:
    """Nodes that are started before their coordinator, and wait for its ticket."""
    every = ["join", ticket, f"{JOBS}:slow", "--name", "desk", "--road", "tcp", "--log", "verbose", *words]
    variables = {"W5XDE_STATE": str(folder / "nodes"), "TEST_HURRY_FILE": str(folder / "hurry")}
    with command(*every, cwd=folder, **variables) as process:
        yield process


def begun(*words: str) -> list[str]:
    """The words that begin a run whose secrets lie beside it."""
    return [f"{JOBS}:slow", "--name", "mine", "--steps", str(STEPS), "--checkpoint-every", "5steps", *words]


def names(run: Path) -> list[tuple[str, str]]:
    """The nodes that the run knows, with their ids: one that comes back by its credential stays the same."""
    return [(node.id, node.name) for node in TicketRegister(run).nodes()]


def kill_in_the_middle(coordinator: Process, run: Path, nodes: int) -> list[tuple[str, str]]:
    """Kill a coordinator that has these nodes and a checkpoint; returns the nodes. Then batches are fast."""
    wait_until(lambda: (run / "tickets.json").exists() and len(names(run)) == nodes, lambda: coordinator.text)
    wait_until(lambda: any(run.glob("checkpoints/step-*[1-9]*")), lambda: coordinator.text)
    coordinator.kill_with_children()
    assert coordinator.wait() < 0, coordinator.text
    (run.parents[1] / "hurry").touch()
    return names(run)


def same_as_alone(folder: Path) -> None:
    """The run has the weights of an undisturbed one, and its ledger is whole."""
    alone = w5xde.train(small_job, nodes=1, steps=STEPS, runs=str(folder / "alone"), progress=False)
    run = folder / "runs" / "mine"
    assert alone.summary["weights_sha256"] in (run / "manifest.json").read_text()
    assert audit_run(run).is_clean


@pytest.mark.parametrize("nodes", [1, 2])
def test_nodes_follow_a_coordinator_that_was_killed_and_resumed_elsewhere(nodes: int, tmp_path: Path) -> None:
    run, ticket = tmp_path / "runs" / "mine", tmp_path / "ticket"
    words = begun("--port", "0", "--identity", "keys", "--ticket-file", "ticket")
    with joined(tmp_path, "--nodes", str(nodes), "--wait", "10m") as machine:
        machine.wait_for("waiting for a ticket: the ticket's file ticket cannot be read")
        with served(tmp_path, *words) as first:
            before = parse(wait_for_file(ticket).read_text())
            known = kill_in_the_middle(first, run, nodes)
        machine.wait_for("lost the coordinator")
        port = free_port()
        # It inherits the identity and the file from the run, and nothing from the first machine.
        with served(tmp_path, "--resume", "mine", "--port", str(port), state="second") as second:
            assert second.wait() == 0, second.text
        assert machine.wait() == 0, machine.text
    assert f"the coordinator is now at 127.0.0.1:{port}" in machine.text
    after = parse(ticket.read_text())
    assert after.fingerprint == before.fingerprint
    assert after.addresses == (("127.0.0.1", port),)
    assert after.id != before.id
    assert names(run) == known
    assert not list(tmp_path.glob("first/runs/*.pem")) + list(tmp_path.glob("second/runs/*.pem"))
    same_as_alone(tmp_path)


def test_nodes_follow_in_clear_text_too(tmp_path: Path) -> None:
    """On one machine, without an identity."""
    run = tmp_path / "runs" / "mine"
    with joined(tmp_path, "--nodes", "1", "--wait", "forever") as machine:
        with served(tmp_path, *begun("--port", "0", "--ticket-file", "ticket")) as first:
            known = kill_in_the_middle(first, run, 1)
        with served(tmp_path, "--resume", "mine", "--port", str(free_port()), state="second") as second:
            assert second.wait() == 0, second.text
        assert machine.wait() == 0, machine.text
    assert names(run) == known
    same_as_alone(tmp_path)


def test_a_ticket_that_was_made_before_the_run_is_all_that_anybody_needs(tmp_path: Path) -> None:
    """Neither side has ever seen the other, and the coordinator comes back at the same place."""
    port, run = free_port(), tmp_path / "runs" / "mine"
    make = ["ticket", "new", "--offline", "--identity", "keys", "--advertise", "127.0.0.1"]
    with command(*make, "--port", str(port), "--uses", "2", "--out", "ticket", cwd=tmp_path) as made:
        assert made.wait() == 0, made.text
    secrets = ["--host", "127.0.0.1", "--port", str(port), "--identity", "keys", "--ticket", "@ticket"]
    with joined(tmp_path, "--nodes", "2", "--wait", "10m") as machine:
        with served(tmp_path, *begun(*secrets)) as first:
            wait_until(
                lambda: (run / "tickets.json").exists() and len(names(run)) == 2,
                lambda: first.text + machine.text,
            )
            late = {"W5XDE_STATE": str(tmp_path / "late")}
            with command("join", "@ticket", f"{JOBS}:slow", "--nodes", "1", cwd=tmp_path, **late) as third:
                assert third.wait() == JoinError.exit_code
            assert "error[W5-105]" in third.text
            assert "used up after 2 uses" in third.text
            known = kill_in_the_middle(first, run, 2)
        with served(tmp_path, "--resume", "mine", *secrets, state="second") as second:
            assert second.wait() == 0, second.text
        assert machine.wait() == 0, machine.text
    assert names(run) == known
    assert len(TicketRegister(run).tickets()) == 1
    text = (tmp_path / "ticket").read_text().strip()
    assert text not in first.text + second.text + machine.text
    same_as_alone(tmp_path)


def test_a_node_does_not_follow_its_file_to_another_run(tmp_path: Path) -> None:
    run, entrance = tmp_path / "runs" / "mine", ["--port", "0", "--ticket-file", "ticket"]
    with joined(tmp_path, "--nodes", "1", "--wait", "10m") as machine:
        with served(tmp_path, *begun("--identity", "keys", *entrance)) as first:
            kill_in_the_middle(first, run, 1)
        words = [f"{JOBS}:slow", "--name", "other", "--identity", "others", "--epochs", "9999", *entrance]
        with served(tmp_path, *words) as other:
            assert machine.wait() == JoinError.exit_code, machine.text + other.text
            assert names(tmp_path / "runs" / "other") == []
    assert "error[W5-119]: the ticket is now that of another coordinator" in machine.text


def test_a_ticket_of_an_earlier_run_is_waited_out(tmp_path: Path) -> None:
    """The same identity, and a file that the new run has not written yet."""
    port = str(free_port())
    entrance = ["--port", port, "--identity", "keys", "--ticket-file"]
    with served(tmp_path, f"{JOBS}:job", "--name", "earlier", "--nodes", "1", *entrance, "ticket") as earlier:
        assert earlier.wait() == 0, earlier.text
    with served(tmp_path, *begun(*entrance, "fresh")) as first:
        wait_for_file(tmp_path / "fresh")
        with joined(tmp_path, "--nodes", "1", "--wait", "10m") as machine:
            machine.wait_for("does not know this ticket; waiting for another one")
            (tmp_path / "hurry").touch()
            (tmp_path / "fresh").rename(tmp_path / "ticket")
            assert first.wait() == 0, first.text
            assert machine.wait() == 0, machine.text
    same_as_alone(tmp_path)


def test_a_run_that_has_lost_its_key_says_so(tmp_path: Path) -> None:
    """As before, if no identity is given: the key is in the state folder of the first machine."""
    words = begun("--host", "0.0.0.0", "--port", "0", "--nodes", "1")
    with served(tmp_path, *words) as first:
        kill_in_the_middle(first, tmp_path / "runs" / "mine", 0)
    with served(tmp_path, "--resume", "mine", state="second") as second:
        assert second.wait() == 0, second.text
    assert "W5-127: this run had another identity before" in second.text


def test_a_function_says_where_the_coordinator_is_to_all_nodes_of_a_machine(tmp_path: Path) -> None:
    """It is called in the process of the program, whatever processes compute."""
    run, ticket, calls = tmp_path / "runs" / "mine", tmp_path / "ticket", tmp_path / "calls"

    def locate() -> str | None:
        with calls.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if not ticket.exists():
            return None
        if calls.read_text().count("\n") < 3:
            raise LookupError("not in the registry yet")
        return ticket.read_text()

    def join() -> None:
        os.environ["W5XDE_STATE"] = str(tmp_path / "nodes")
        os.environ["TEST_HURRY_FILE"] = str(tmp_path / "hurry")
        settings = {"nodes": 2, "node_name": "desk", "wait": "10m", "log": "verbose", "road": "tcp"}
        report = w5xde.join(locate=locate, job=f"{JOBS}:slow", **settings)  # type: ignore[arg-type]
        print("pid", os.getpid(), report.title)

    with forked(join) as machine:
        machine.wait_for("waiting for a ticket: locate() knows no ticket yet")
        words = begun("--port", "0", "--identity", "keys", "--ticket-file", "ticket")
        with served(tmp_path, *words) as first:
            known = kill_in_the_middle(first, run, 2)
        with served(tmp_path, "--resume", "mine", "--port", str(free_port()), state="second") as second:
            assert second.wait() == 0, second.text
        assert machine.wait() == 0, machine.text
    assert names(run) == known
    pid = machine.text.split("pid")[1].split()[0]
    assert set(calls.read_text().split()) == {pid}
    same_as_alone(tmp_path)


def test_a_function_that_fails_is_shown_with_its_line(tmp_path: Path) -> None:
    def locate() -> None:
        raise LookupError("no registry here")

    with pytest.raises(JoinError, match="locate") as caught:
        w5xde.join(locate=locate, job=small_job, wait="0.3s", progress=False)
    assert caught.value.code == "W5-128"
    assert "LookupError: no registry here (test_moved_coordinator.py, line" in caught.value.what


@pytest.mark.parametrize("kind", ["folder", "pipe", "huge", "nothing"])
def test_a_file_that_can_never_hold_a_ticket_ends_in_time_with_its_code(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "ticket"
    match kind:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "huge":
            file.touch()
            os.truncate(file, 2**40)
    with joined(tmp_path, "--wait", "0.5s") as machine:
        status = machine.wait()
    code, status_expected = ("W5-101", 10) if kind == "huge" else ("W5-116", 2)
    assert status == status_expected, machine.text
    assert f"error[{code}]" in machine.text


def test_waiting_for_a_file_is_interrupted_at_once(tmp_path: Path) -> None:
    with joined(tmp_path, "--wait", "forever") as machine:
        machine.wait_for("waiting for a ticket")
        machine.interrupt()
        assert machine.wait() == 75, machine.text
