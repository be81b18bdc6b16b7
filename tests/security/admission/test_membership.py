"""Tickets expire and are revoked, nodes stay; one node is banned alone; a restart changes nothing of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest

import w5xde
from tests.security.pool import HERE, attacked, wait_until
from tests.system.harness import JOBS, command, ended, events, forked, run_json, when_there
from w5xde.cli.main import main
from w5xde.runtime.admission.credentials import pool_of
from w5xde.runtime.admission.register import TicketRegister
from w5xde.ticket import Ticket, parse


def kept(state: Path, ticket: Ticket) -> Path:
    return state / "nodes" / pool_of(ticket) / "00.json"


def joins(folder: Path, node: str) -> int:
    return sum(record["kind"] == "joined" and record["node"] == node for record in events(folder))


def test_a_revoked_ticket_disconnects_nobody_and_a_ban_one_node_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path), "--json"]
    with attacked(tmp_path) as run:
        file = tmp_path / "here"
        file.write_text(run.ticket.to_text())
        states = {name: tmp_path / f"state-{name}" for name in ("good", "bad")}
        with (
            command(
                "join", f"@{file}", f"{JOBS}:slow", "--name", "good", W5XDE_STATE=str(states["good"])
            ) as good,
            command(
                "join", f"@{file}", f"{JOBS}:slow", "--name", "bad", W5XDE_STATE=str(states["bad"])
            ) as bad,
        ):
            good.wait_for("joined mine as good")
            bad.wait_for("joined mine as bad")
            for name, state in states.items():
                assert stat.S_IMODE(kept(state, run.ticket).stat().st_mode) == 0o600, name
            assert main(["ticket", "list", "mine", *runs]) == 0
            listed = json.loads(capfd.readouterr().out)
            assert sorted(node["name"] for node in listed["nodes"]) == ["bad", "good"]
            assert main(["ticket", "revoke", "mine", run.ticket.id.hex()[:8], *runs]) == 0
            began = time.monotonic()
            assert main(["ticket", "ban", "mine", "bad", "--reason", "it cheated", *runs]) == 0
            capfd.readouterr()
            assert bad.finish() == 10
            assert time.monotonic() - began < 5.0, "a second or two, and the end of a process"
            assert "error[W5-112]: the coordinator turned this node out" in bad.text
            assert "banned from the run: it cheated" in bad.text
            # It does not come back: neither as who it was, nor by a ticket that is revoked.
            with command("join", f"@{file}", f"{JOBS}:slow", W5XDE_STATE=str(states["bad"])) as again:
                assert again.finish() == 10
            assert "error[W5-114]" in again.text
            kept(states["bad"], run.ticket).unlink()
            with command("join", f"@{file}", f"{JOBS}:slow", W5XDE_STATE=str(states["bad"])) as again:
                assert again.finish() == 10
            assert "error[W5-105]" in again.text
            assert "good left" not in run.told()
            good.process.send_signal(signal.SIGINT)
            assert good.finish() == 0
            # Who was let in once comes back, whatever became of the ticket.
            with command("join", f"@{file}", f"{JOBS}:slow", W5XDE_STATE=str(states["good"])) as back:
                back.wait_for("joined mine")
                result = run.stop_and_compare(tmp_path)
                assert back.finish() == 0
        assert {node["name"] for node in result["nodes"]} >= {"local-1", "good", "bad"}


def test_a_ban_goes_by_the_name_that_a_node_has_in_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ask for one name, as nodes of one machine do; one gets another, and is banned by that."""
    runs = ["--runs", str(tmp_path), "--json"]
    with attacked(tmp_path) as run:
        file = tmp_path / "here"
        file.write_text(run.ticket.to_text())
        join = ["join", f"@{file}", f"{JOBS}:slow", "--name", "twin"]
        with (
            command(*join, W5XDE_STATE=str(tmp_path / "first")) as first,
            command(*join, W5XDE_STATE=str(tmp_path / "second")) as second,
        ):
            lines = [first.wait_for("joined mine as "), second.wait_for("joined mine as ")]
            names = [line.split(" as ")[1].split()[0] for line in lines]
            assert sorted(names) == ["twin", "twin-2"]
            stays, goes = (first, second) if names[1] == "twin-2" else (second, first)
            assert main(["ticket", "list", "mine", *runs]) == 0
            listed = json.loads(capfd.readouterr().out)
            assert sorted(node["name"] for node in listed["nodes"]) == ["twin", "twin-2"]
            assert main(["ticket", "ban", "mine", "twin-2", *runs]) == 0
            banned = json.loads(capfd.readouterr().out)["banned"]
            assert [node["name"] for node in banned] == ["twin-2"]
            assert goes.finish() == 10
            assert "error[W5-112]" in goes.text
            run.wait_until_told("twin-2 left")
            assert "twin left" not in run.told()
            stays.process.send_signal(signal.SIGINT)
            assert stays.finish() == 0
        run.stop()


def test_a_cheat_that_was_turned_out_does_not_come_back_whatever_it_tries(tmp_path: Path) -> None:
    """As itself, by its ticket, and to the next life of the coordinator: refused, and told why."""
    with attacked(tmp_path, verify=1.0, checkpoint_every="2steps") as run:
        file, state = tmp_path / "here", tmp_path / "state-cheat"
        file.write_text(run.ticket.to_text())

        def refused(name: str) -> str:
            join = ["join", f"@{file}", f"{JOBS}:flipped", "--name", name, "--road", "tcp"]
            with command(*join, W5XDE_STATE=str(state)) as cheat:
                assert cheat.finish() == 10, cheat.text
            return cheat.text

        assert "error[W5-112]: the coordinator turned this node out" in refused("cheat")
        run.wait_until_told("'kind': 'banned', 'node': 'cheat'")
        for name in ("cheat", "innocent"):
            text = refused(name)
            assert "error[W5-114]: this node is banned from the run: an update of it was" in text
        kept(state, run.ticket).rename(tmp_path / "kept")
        assert "error[W5-114]: a node that came from here by this ticket is banned" in refused("innocent")
        assert [node.name for node in run.register.nodes()] == ["cheat"]
        run.wait_for_step(3)
        os.kill(run.pid, signal.SIGKILL)
        assert ended(run.pid) == -signal.SIGKILL
        (tmp_path / "ticket").unlink()
        with forked(lambda: w5xde.serve(f"{JOBS}:slow", resume="mine", runs=str(tmp_path))) as second:
            when_there(tmp_path / "ticket")
            assert "error[W5-114]: a node that came from here" in refused("cheat")
            (tmp_path / "kept").rename(kept(state, run.ticket))
            assert "error[W5-114]: this node is banned" in refused("cheat")
            # Whoever runs the coordinator may think otherwise.
            assert main(["ticket", "unban", "mine", "cheat", "--runs", str(tmp_path)]) == 0
            assert "error[W5-112]: the coordinator turned this node out" in refused("cheat")
            os.kill(second, signal.SIGINT)
            assert ended(second) == 0
    assert joins(run.folder, "cheat") == 2
    assert joins(run.folder, "innocent") == 0


def test_nodes_come_back_over_tls_to_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    """With their credentials: the ticket has been revoked meanwhile, and the certificate is the same."""
    with (
        attacked(tmp_path, checkpoint_every="2steps") as run,
        forked(lambda: w5xde.join(run.ticket, f"{JOBS}:slow", node_name="guest", road="tcp")) as guest,
    ):
        run.wait_until_told("guest joined")
        run.wait_for_step(3)
        run.register.revoke(run.ticket.id.hex(), time.time())
        os.kill(run.pid, signal.SIGKILL)
        assert ended(run.pid) == -signal.SIGKILL
        (tmp_path / "ticket").unlink()
        resume = {"resume": "mine", "runs": str(tmp_path)}
        with forked(lambda: w5xde.serve(f"{JOBS}:slow", **resume)) as second:
            ticket = parse(when_there(tmp_path / "ticket").read_text())
            assert ticket.fingerprint == run.ticket.fingerprint
            assert ticket.addresses[0][1] == run.port, "the port of before, so that nodes find it"
            wait_until(lambda: joins(run.folder, "guest") == 2, lambda: "the guest did not come back")
            os.kill(second, signal.SIGINT)
            assert ended(second) == 0
        assert ended(guest) == 0
    nodes = TicketRegister(run.folder).nodes()
    assert [node.name for node in nodes] == ["guest"]
    result = json.loads((run.folder / "manifest.json").read_text())["result"]
    alone = {**run.settings, "host": "127.0.0.1", "name": "alone", "epochs": None, "ticket_file": None}
    again = w5xde.train(f"{JOBS}:job", runs=str(tmp_path), **{**alone, "steps": result["steps"]})
    assert again.summary["weights_sha256"] == result["weights_sha256"]


def test_with_a_new_identity_nobody_comes_by_what_was_handed_out_before(tmp_path: Path) -> None:
    with attacked(tmp_path, nodes=0, checkpoint_every="2steps") as run:
        with forked(lambda: w5xde.join(run.ticket, f"{JOBS}:slow", node_name="guest", road="tcp")) as guest:
            run.wait_until_told("guest joined")
            run.wait_for_step(1)
            os.kill(run.pid, signal.SIGKILL)
            assert ended(run.pid) == -signal.SIGKILL
            os.kill(guest, signal.SIGKILL)
            ended(guest)
        file, old = tmp_path / "ticket", tmp_path / "old"
        file.rename(old)
        old.write_text(run.ticket.to_text())
        # A start that comes to nothing changes nothing, not even where the run is served.
        resume = ["serve", f"{JOBS}:slow", "--resume", "mine", "--runs", str(tmp_path), "--new-identity"]
        with socket.create_server((HERE, 0)) as taken:
            assert main([*resume, "--host", HERE, "--port", str(taken.getsockname()[1])]) == 2
        assert [node.name for node in run.register.nodes()] == ["guest"]
        with command(*resume) as second:
            second.wait_for("the run has a new identity: nobody comes by a ticket or credential of before")
            ticket = parse(when_there(file).read_text())
            assert ticket.fingerprint != run.ticket.fingerprint
            assert run.register.nodes() == []
            # Whoever comes over TLS sees another certificate; on this machine nobody knows the ticket.
            for road, code in (("tcp", "W5-501"), ("auto", "W5-113")):
                with command("join", f"@{old}", f"{JOBS}:slow", "--road", road) as before:
                    assert before.finish() == 10
                assert f"error[{code}]" in before.text
            with command("join", f"@{file}", f"{JOBS}:slow", "--name", "again") as after:
                after.wait_for("joined mine as again")
                second.process.send_signal(signal.SIGINT)
                assert second.finish() == 0
                assert after.finish() == 0
        # That was for once.
        with forked(lambda: w5xde.serve(f"{JOBS}:slow", resume="mine", runs=str(tmp_path), seconds=0.1)):
            file.unlink()
            assert parse(when_there(file).read_text()).fingerprint == ticket.fingerprint


def test_a_node_whose_credential_nobody_knows_any_more_comes_by_its_ticket(tmp_path: Path) -> None:
    with attacked(tmp_path) as run:
        state = tmp_path / "state"
        file = tmp_path / "here"
        file.write_text(run.ticket.to_text())
        join = ["join", f"@{file}", f"{JOBS}:slow", "--name", "guest"]
        with command(*join, W5XDE_STATE=str(state)) as node:
            node.wait_for("joined mine")
            node.process.send_signal(signal.SIGINT)
            assert node.finish() == 0
        # As if the run folder were a copy from before it came.
        book = run.register
        book._change(lambda found: (type(found)(entrance=found.entrance, tickets=found.tickets), None))
        with command(*join, W5XDE_STATE=str(state)) as node:
            node.wait_for("does not know this node any more; trying the ticket")
            node.wait_for("joined mine")
            run.stop()
            assert node.finish() == 0


def test_the_commands_of_tickets_tell_people_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w5xde.train(f"{JOBS}:job", nodes=1, steps=1, name="mine", runs=str(tmp_path))
    new = run_json("ticket", "new", "mine", "--runs", str(tmp_path), "--uses", "1", cwd=tmp_path)
    assert parse(new["ticket"]).id.hex() == new["id"]
    assert main(["ticket", "new", "mine", "--runs", str(tmp_path), "--lifetime", "7d"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("w5xde join w5")
    assert line.endswith(f"{JOBS}:job")
    assert main(["ticket", "list", "mine", "--runs", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "printed at start" in listed
    assert "0 of 1" in listed
    assert new["ticket"] not in listed
    for words, code in [
        (["revoke", "mine", "ffffffff"], "W5-118"),
        (["ban", "mine", "nobody"], "W5-118"),
        (["unban", "mine", "nobody"], "W5-118"),
        (["new", "mine", "--lifetime", "soon"], "W5-117"),
        (["list", "nowhere"], "W5-401"),
    ]:
        assert main(["ticket", *words, "--runs", str(tmp_path)]) != 0
        assert f"error[{code}]" in capsys.readouterr().err
