"""Tickets expire and are revoked, nodes stay; one node is banned alone; a restart changes nothing of it."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import time
from pathlib import Path

import pytest

import w5xde
from tests.processes import (
    HERE,
    JOBS,
    command,
    coordinator,
    events,
    node,
    resumed,
    run_json,
    wait_for_file,
    wait_until,
)
from w5xde.cli.main import main
from w5xde.errors import NOT_OVER
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
    with coordinator(tmp_path) as run:
        file = tmp_path / "here"
        file.write_text(run.ticket.to_text())
        states = {name: tmp_path / f"state-{name}" for name in ("good", "bad")}
        with (
            command(
                "join",
                "--nodes",
                "1",
                f"@{file}",
                f"{JOBS}:slow",
                "--name",
                "good",
                W5XDE_STATE=str(states["good"]),
            ) as good,
            command(
                "join",
                "--nodes",
                "1",
                f"@{file}",
                f"{JOBS}:slow",
                "--name",
                "bad",
                W5XDE_STATE=str(states["bad"]),
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
            assert bad.wait() == 10
            assert time.monotonic() - began < 5.0, "a second or two, and the end of a process"
            assert "error[W5-112]: the coordinator turned this node out" in bad.text
            assert "banned from the run: it cheated" in bad.text
            # It does not come back: neither as who it was, nor by a ticket that is revoked.
            with command(
                "join", "--nodes", "1", f"@{file}", f"{JOBS}:slow", W5XDE_STATE=str(states["bad"])
            ) as again:
                assert again.wait() == 10
            assert "error[W5-114]" in again.text
            kept(states["bad"], run.ticket).unlink()
            with command(
                "join", "--nodes", "1", f"@{file}", f"{JOBS}:slow", W5XDE_STATE=str(states["bad"])
            ) as again:
                assert again.wait() == 10
            assert "error[W5-105]" in again.text
            assert "good left" not in run.ledger_text()
            good.interrupt()
            assert good.wait() == NOT_OVER
            # Who was let in once comes back, whatever became of the ticket.
            with command(
                "join", "--nodes", "1", f"@{file}", f"{JOBS}:slow", W5XDE_STATE=str(states["good"])
            ) as back:
                back.wait_for("joined mine")
                result = run.stop_and_compare(tmp_path)
                assert back.wait() == NOT_OVER
        assert {node["name"] for node in result["nodes"]} >= {"local-1", "good", "bad"}


def test_a_ban_goes_by_the_name_that_a_node_has_in_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both ask for one name, as nodes of one machine do; one gets another, and is banned by that."""
    runs = ["--runs", str(tmp_path), "--json"]
    with coordinator(tmp_path) as run:
        file = tmp_path / "here"
        file.write_text(run.ticket.to_text())
        join = ["join", "--nodes", "1", f"@{file}", f"{JOBS}:slow", "--name", "twin"]
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
            assert goes.wait() == 10
            assert "error[W5-112]" in goes.text
            run.wait_until_recorded("twin-2 left")
            assert "twin left" not in run.ledger_text()
            stays.interrupt()
            assert stays.wait() == NOT_OVER
        run.stop()


def test_a_cheat_that_was_turned_out_does_not_come_back_whatever_it_tries(tmp_path: Path) -> None:
    """As itself, by its ticket, and to the next life of the coordinator: refused, and told why."""
    with coordinator(tmp_path, verify=1.0, checkpoint_every="2steps") as run:
        file, state = tmp_path / "here", tmp_path / "state-cheat"
        file.write_text(run.ticket.to_text())

        def refused(name: str) -> str:
            join = ["join", "--nodes", "1", f"@{file}", f"{JOBS}:flipped", "--name", name, "--road", "tcp"]
            with command(*join, W5XDE_STATE=str(state)) as cheat:
                assert cheat.wait() == 10, cheat.text
            return cheat.text

        assert "error[W5-112]: the coordinator turned this node out" in refused("cheat")
        run.wait_until_recorded("'kind': 'banned', 'node': 'cheat'")
        for name in ("cheat", "innocent"):
            text = refused(name)
            assert "error[W5-114]: this node is banned from the run: an update of it was" in text
        kept(state, run.ticket).rename(tmp_path / "kept")
        assert "error[W5-114]: a node that came from here by this ticket is banned" in refused("innocent")
        assert [node.name for node in run.register.nodes()] == ["cheat"]
        run.wait_for_step(3)
        run.kill()
        with resumed(run) as second:
            assert "error[W5-114]: a node that came from here" in refused("cheat")
            (tmp_path / "kept").rename(kept(state, run.ticket))
            assert "error[W5-114]: this node is banned" in refused("cheat")
            # Whoever runs the coordinator may think otherwise.
            assert main(["ticket", "unban", "mine", "cheat", "--runs", str(tmp_path)]) == 0
            assert "error[W5-112]: the coordinator turned this node out" in refused("cheat")
            second.stop()
    assert joins(run.folder, "cheat") == 2
    assert joins(run.folder, "innocent") == 0


def test_nodes_come_back_over_tls_to_a_coordinator_that_was_killed(tmp_path: Path) -> None:
    """With their credentials: the ticket has been revoked meanwhile, and the certificate is the same."""
    with (
        coordinator(tmp_path, checkpoint_every="2steps") as run,
        node(run.ticket, node_name="guest", road="tcp") as guest,
    ):
        run.wait_until_recorded("guest joined")
        run.wait_for_step(3)
        run.register.revoke(run.ticket.id.hex(), time.time())
        run.kill()
        with resumed(run) as second:
            assert second.ticket.fingerprint == run.ticket.fingerprint
            assert second.port == run.port, "nodes look for it at the port of before"
            wait_until(lambda: joins(run.folder, "guest") == 2, lambda: "the guest did not come back")
            result = second.stop()
        assert guest.wait() == 0
    nodes = TicketRegister(run.folder).nodes()
    assert [node.name for node in nodes] == ["guest"]
    run.compare(tmp_path, result)


def test_with_a_new_identity_nobody_comes_by_what_was_handed_out_before(tmp_path: Path) -> None:
    with coordinator(tmp_path, nodes=0, checkpoint_every="2steps") as run:
        with node(run.ticket, node_name="guest", road="tcp"):
            run.wait_until_recorded("guest joined")
            run.wait_for_step(1)
            run.kill()
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
            ticket = parse(wait_for_file(file).read_text())
            assert ticket.fingerprint != run.ticket.fingerprint
            assert run.register.nodes() == []
            # Whoever comes over TLS sees another certificate; on this machine nobody knows the ticket.
            for road, code, wait in (("tcp", "W5-501", "0"), ("auto", "W5-113", "5")):
                with command(
                    "join", "--nodes", "1", f"@{old}", f"{JOBS}:slow", "--road", road, "--wait", wait
                ) as before:
                    assert before.wait() == 10
                assert f"error[{code}]" in before.text
            with command("join", "--nodes", "1", f"@{file}", f"{JOBS}:slow", "--name", "again") as after:
                after.wait_for("joined mine as again")
                second.interrupt()
                assert second.wait() == NOT_OVER
                assert after.wait() == NOT_OVER
        # That was for once.
        with resumed(run) as third:
            assert third.ticket.fingerprint == ticket.fingerprint


def test_a_node_whose_credential_nobody_knows_any_more_comes_by_its_ticket(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        state = tmp_path / "state"
        file = tmp_path / "here"
        file.write_text(run.ticket.to_text())
        join = ["join", "--nodes", "1", f"@{file}", f"{JOBS}:slow", "--name", "guest"]
        tickets = run.folder / "tickets.json"
        before = shutil.copy2(tickets, tmp_path / "before")
        with command(*join, W5XDE_STATE=str(state)) as guest:
            guest.wait_for("joined mine")
            guest.interrupt()
            assert guest.wait() == NOT_OVER
        assert [each.name for each in run.register.nodes()] == ["guest"]
        # As in a run folder that was restored from before the node came.
        before.replace(tickets)
        with command(*join, W5XDE_STATE=str(state)) as guest:
            guest.wait_for("does not know this node any more; trying the ticket")
            guest.wait_for("joined mine")
            run.stop()
            assert guest.wait() == NOT_OVER


def test_the_commands_of_tickets_tell_people_and_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    w5xde.train(f"{JOBS}:job", nodes=1, steps=1, name="mine", runs=str(tmp_path), progress=False)
    new = run_json("ticket", "new", "mine", "--runs", str(tmp_path), "--uses", "1", cwd=tmp_path)
    assert parse(new["ticket"]).id.hex() == new["id"]
    assert main(["ticket", "new", "mine", "--runs", str(tmp_path), "--lifetime", "7d"]) == 0
    line, *others = capsys.readouterr().out.splitlines()
    assert line.startswith("w5xde join w5")
    # The run sends its code, so that nobody needs to name a copy of it.
    assert line.count(" ") == 2
    assert new["code_sha256"] in others[-2]
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
