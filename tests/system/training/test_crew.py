"""All nodes of a machine behind one `join`: the same bits, no orphans, one line for each event."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    events,
    forked,
    forked_nodes,
    wait_until,
)
from tests.system.jobs import job as small_job
from w5xde.callbacks.status import CrewReport, NodeReport
from w5xde.errors import NOT_OVER, JoinError
from w5xde.runtime.system import capacity
from w5xde.ticket import Ticket


@contextmanager
def crew(ticket: Ticket, *options: str, nodes: int = 3, job: str = "slow") -> Iterator[Process]:
    """A `w5xde join` with several nodes, whose processes are gone at the end."""
    words = ["join", ticket.to_text(), f"{JOBS}:{job}", "--name", "desk", "--nodes", str(nodes), *options]
    with command(*words) as process:
        yield process


def joined(folder: Path) -> set[str]:
    return {event["node"] for event in events(folder) if event["kind"] == "joined"}


def wait_for_nodes(process: Process, folder: Path, names: set[str]) -> None:
    wait_until(lambda: names <= joined(folder), lambda: f"{joined(folder)} joined:\n{process.text}")


DESKS = {"desk", "desk-2", "desk-3"}


def test_a_crew_trains_the_same_bits_and_says_each_thing_once(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run, crew(run.ticket) as machine:
        wait_for_nodes(machine, run.folder, DESKS)
        result = run.stop_and_compare(tmp_path)
        assert machine.wait() == NOT_OVER, machine.text
    assert {node["name"] for node in result["nodes"]} == {*DESKS, "local-1"}
    lines = machine.text.splitlines()
    assert sum("joined mine as" in line for line in lines) <= 2, machine.text
    assert [line for line in lines if line.startswith("done")] == [
        line for line in lines if "done  desk (3 nodes): " in line
    ]
    assert any("(interrupted)" in line for line in lines)


def test_one_interrupt_lets_all_nodes_leave_politely(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run, crew(run.ticket) as machine:
        wait_for_nodes(machine, run.folder, DESKS)
        computing = forked_nodes(machine.pid)
        machine.interrupt()
        assert machine.wait() == NOT_OVER, machine.text
        assert "left as asked" in machine.text
        assert psutil.wait_procs(computing, PATIENCE_SECONDS)[1] == []
        for _ in DESKS:
            run.process.wait_for("left (it said goodbye)")
        run.stop()


def test_the_second_interrupt_stops_all_nodes_now(tmp_path: Path) -> None:
    with coordinator(tmp_path, batch_size=60) as run:
        with command(
            "join", run.ticket.to_text(), f"{JOBS}:slow", "--nodes", "2", TEST_BATCH_SECONDS="4"
        ) as machine:
            machine.wait_for("joined mine as")
            wait_until(lambda: len(forked_nodes(machine.pid)) == 2, lambda: machine.text)
            computing = forked_nodes(machine.pid)
            machine.interrupt()
            machine.wait_for("once more stops now")
            machine.interrupt()
            assert machine.wait() == NOT_OVER, machine.text
            assert psutil.wait_procs(computing, PATIENCE_SECONDS)[1] == []
        run.stop()


def test_a_killed_node_is_started_again_and_the_machine_goes_on(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run, crew(run.ticket) as machine:
        wait_for_nodes(machine, run.folder, DESKS)
        victim = forked_nodes(machine.pid)[0]
        victim.kill()
        machine.wait_for("died (signal 9) and is started again")
        wait_until(
            lambda: len(forked_nodes(machine.pid)) == 3 and victim not in forked_nodes(machine.pid),
            lambda: machine.text,
        )
        # It comes back by its own credential, as the same node.
        before = len(events(run.folder))
        wait_until(
            lambda: any(event["kind"] == "joined" for event in events(run.folder)[before - 9 :]),
            lambda: machine.text,
        )
        run.stop_and_compare(tmp_path)
        assert machine.wait() == NOT_OVER, machine.text
    assert {node["name"] for node in run.result()["nodes"]} == {*DESKS, "local-1"}


def test_no_node_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run, crew(run.ticket) as machine:
        wait_for_nodes(machine, run.folder, DESKS)
        family = psutil.Process(machine.pid).children(recursive=True)
        machine.kill()
        assert psutil.wait_procs(family, PATIENCE_SECONDS)[1] == []
        for _ in DESKS:
            run.process.wait_for("left (it said goodbye)")
        run.stop_and_compare(tmp_path)


def test_a_crew_that_is_refused_is_told_once(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run, crew(run.ticket, job="other") as machine:
        assert machine.wait() == JoinError.exit_code
        run.stop()
    assert machine.text.count("error[W5-201]") == 1, machine.text
    assert "desk-2" not in machine.text


def test_nodes_that_the_ticket_does_not_admit_leave_the_others_alone(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        text = run.register.new(time.time(), uses=1)
        with crew(replace(text, addresses=run.ticket.addresses)) as machine:
            machine.wait_for("desk-2, desk-3 ended (error[")
            run.wait_for_step(3)
            run.stop()
            assert machine.wait() == NOT_OVER, machine.text
    assert {node["name"] for node in run.result()["nodes"]} == {"desk", "local-1"}


def test_python_gets_the_totals_of_all_nodes_and_their_work(tmp_path: Path) -> None:
    """The callbacks of `join` are called in the process of the user, whichever process computes."""
    told = tmp_path / "told.jsonl"

    class Teller(w5xde.Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_work(self, node: NodeReport, batches: int, loss: float) -> None:
            self.batches += batches
            assert loss > 0

    def join(ticket: Ticket) -> None:
        teller = Teller()
        report = w5xde.join(ticket, f"{JOBS}:slow", nodes=2, node_name="desk", callbacks=[teller])
        assert isinstance(report, CrewReport)
        facts = {"batches": report.batches, "seen": teller.batches, "nodes": len(report.nodes)}
        told.write_text(json.dumps(facts | {"reason": report.reason}))

    with (
        coordinator(tmp_path, nodes=0, epochs=None, steps=10) as run,
        forked(functools.partial(join, run.ticket)) as machine,
    ):
        assert machine.wait() == 0, machine.text
        assert run.process.wait() == 0
    facts = json.loads(told.read_text())
    assert facts["batches"] == facts["seen"] >= run.result()["batches"]
    assert (facts["nodes"], facts["reason"]) == (2, "all steps done")


def test_a_crew_whose_nodes_are_all_killed_says_so(tmp_path: Path) -> None:
    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    deadly = w5xde.Job(model=die, data=small_job.data, loss=small_job.loss, optimizer=small_job.optimizer)
    with coordinator(tmp_path) as run:

        def join() -> None:
            with pytest.raises(JoinError, match="every node of this machine was killed") as error:
                w5xde.join(run.ticket, deadly, nodes=2, node_name="desk")
            assert error.value.code == "W5-280"

        with forked(join) as machine:
            assert machine.wait() == 0, machine.text
        run.stop()
    assert "desk died (signal 9) and is started again" in machine.text


def test_as_many_nodes_follow_the_first_as_have_room_in_memory(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:

        def join() -> None:
            # Room for the first node and about two more like it.
            capacity.core_count = lambda: 6
            capacity.available_bytes = lambda: 2**28 + 2 * 130 * 2**20
            capacity.grown_bytes = lambda pid: 100 * 2**20
            w5xde.join(run.ticket, f"{JOBS}:slow", node_name="desk")

        with forked(join) as machine:
            machine.wait_for("memory has room for 3 nodes here, and there are cores for 6")
            wait_for_nodes(machine, run.folder, DESKS)
            assert len(forked_nodes(machine.pid)) == 3
            run.stop_and_compare(tmp_path)
            assert machine.wait() == 0, machine.text


def test_join_uses_all_cores_of_its_machine_by_default(tmp_path: Path) -> None:
    """Here the machine has four, and the run computes with two threads in each node."""
    with coordinator(tmp_path, threads=2) as run:

        def join() -> None:
            capacity.core_count = lambda: 4
            w5xde.join(run.ticket, f"{JOBS}:slow", node_name="desk")

        with forked(join) as machine:
            wait_for_nodes(machine, run.folder, {"desk", "desk-2"})
            run.wait_for_step(5)
            assert len(forked_nodes(machine.pid)) == 2
            run.stop_and_compare(tmp_path)
            assert machine.wait() == 0, machine.text
