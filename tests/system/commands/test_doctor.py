"""The doctor against real sockets, folders and limits: what is wrong is told with its fix, nothing hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import HERE, JOBS, command, coordinator, forked, run_python, ticket_of
from tests.sockets import answering, clear_ticket, closed_port, free_port, full_backlog
from w5xde.bench.measure.processes import Line
from w5xde.bench.measure.relay import be_relay, open_listener
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.doctor import local_checks as here
from w5xde.doctor import remote_checks as there
from w5xde.doctor.finding import Check, Finding, examine
from w5xde.doctor.link_probe import measure_link
from w5xde.errors import JobError, JoinError, UsageError
from w5xde.learn.job.job import load_job
from w5xde.learn.model import cgroup
from w5xde.messages import Beat, Refuse
from w5xde.protocol.wire import encode
from w5xde.specs.round_settings import ROUND_STEPS_USUAL
from w5xde.ticket import Ticket, parse

KEYS = {"check", "state", "what", "fix", "code", "measured"}


def only(findings: Iterator[Finding]) -> Finding:
    [finding] = findings
    return finding


def route(*addresses: str) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    found_targets = [there.target_of(address) for address in addresses]
    places = tuple(each for target in found_targets for each in target.addresses)
    for finding in there.check_route(there.Target(places, found_targets[0].ticket)):
        found.setdefault(finding.check, []).append(finding)
    return found


# --- the command ----------------------------------------------------------------------------------


def test_a_healthy_machine_is_told_so_line_by_line_and_in_json(tmp_path: Path) -> None:
    done = run_python("-m", "w5xde", "doctor", "--port", str(free_port()), "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["healthy"]
    assert report.keys() == {"healthy", "target", "errors", "warnings", "checks"}
    assert all(each.keys() == KEYS for each in report["checks"])
    names = [each["check"] for each in report["checks"]]
    assert names == [
        "python",
        "memory",
        "clock",
        "disk",
        "files",
        "port",
        "addresses",
        "torch",
        "device",
        "compute",
    ]
    lines = done.stderr.splitlines()
    assert [line.split()[1] for line in lines if line.startswith(("ok ", "warning "))] == names
    measured = {each["check"]: each["measured"] for each in report["checks"]}
    assert measured["memory"]["available_bytes"] > 0
    assert measured["disk"]["sync_seconds"] > 0
    assert measured["compute"]["samples_per_second"] > 0
    assert not list(tmp_path.iterdir()), "looking leaves nothing behind"


def test_a_coordinator_is_looked_at_and_not_disturbed(tmp_path: Path) -> None:
    with command("serve", f"{JOBS}:job", "--port", "0", "--epochs", "1", cwd=tmp_path) as coordinator:
        ticket = ticket_of(coordinator)
        found = route(ticket)
        assert [each.state for each in found["route"]] == ["ok"]
        assert found["coordinator"][0].what.startswith("run jobs-")
        assert found["tls"][0].measured == {"tls": None}
        assert found["link"][0].measured["round_trip_seconds"] > 0
        assert "w5xde doctor was only looking" in coordinator.wait_for("doctor did not join")
        with command("join", ticket, f"{JOBS}:job") as node:
            assert node.wait() == 0, node.text
        assert coordinator.wait() == 0, coordinator.text


def test_a_machine_on_which_something_fails_has_exit_code_1_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = ["--runs", str(tmp_path / "file" / "runs"), "--device", "cuda:77", "--port", "0"]
    with closed_port() as address:
        assert main(["doctor", address, *arguments]) == 1
    told = capsys.readouterr().out
    for name, code in (("disk", "W5-404"), ("device", "W5-301"), ("route", "W5-103")):
        lines = told[told.index(f"error    {name}") :].splitlines()
        assert lines[1].startswith("  fix: ")
        assert lines[2] == f"  more: w5xde explain {code}"
    assert "Traceback" not in told


def test_what_is_no_address_is_refused_before_anything_is_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "nonsense"]) == JoinError.exit_code
    assert capsys.readouterr().err.startswith("error[W5-101]: this is not a ticket")
    assert main(["doctor", "nonsense:"]) == UsageError.exit_code
    told = capsys.readouterr()
    assert told.err.startswith("error[W5-111]: 'nonsense:' is not an address")
    assert told.out == ""


# --- nothing hangs --------------------------------------------------------------------------------


def test_a_check_that_never_ends_is_left_alone_and_one_that_fails_is_a_finding() -> None:
    never = threading.Event()

    def hang() -> Iterator[Finding]:
        yield Finding("stuck", "ok", "so far")
        never.wait()

    def fail() -> Iterator[Finding]:
        raise ZeroDivisionError("oh")
        yield

    fine = Check("fine", 5.0, lambda: iter([Finding("fine", "ok", "yes")]))
    found = list(examine([Check("stuck", 0.05, hang), Check("broken", 5.0, fail), fine]))
    never.set()
    assert [(each.check, each.state) for each in found] == [
        ("stuck", "ok"), ("stuck", "error"), ("broken", "error"), ("fine", "ok"),
    ]  # fmt: skip
    assert "no answer within" in found[1].what
    assert "ZeroDivisionError: oh" in found[2].what
    assert all(each.fix for each in found if each.state != "ok")


# --- the way there --------------------------------------------------------------------------------


def test_a_closed_port_is_told() -> None:
    with closed_port() as address:
        refused = route(address)["route"][0]
    assert (refused.state, refused.code) == ("error", "W5-103")
    assert "Connection refused" in refused.what
    assert "w5xde serve" in refused.fix


def test_an_address_to_which_there_is_no_way_is_told() -> None:
    # Multicast: no system connects there, whatever its routes are.
    [finding] = route("224.0.0.1:5555")["route"]
    assert (finding.state, finding.code) == ("error", "W5-103")
    assert "224.0.0.1:5555" in finding.what


def test_a_machine_that_drops_what_is_sent_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(there, "DIAL_SECONDS", 0.2)
    with full_backlog() as address:
        before = time.monotonic()
        [finding] = route(address)["route"]
        assert time.monotonic() - before < 5.0
    assert (finding.state, finding.code) == ("error", "W5-104")
    assert "firewall" in finding.fix


def test_a_name_nobody_knows_is_told() -> None:
    [finding] = route("no-such-host.invalid:5555")["route"]
    assert finding.state == "error"
    assert "is not known" in finding.what


def test_one_address_that_answers_is_enough() -> None:
    with answering(lambda connection: None) as address, closed_port() as closed:
        states = [each.state for each in route(closed, address)["route"]]
    assert states == ["warning", "ok"]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silence", "http"])
def test_something_else_that_listens_there_is_told(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(there, "GREETING_SECONDS", 0.5)

    def reply(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(answer)

    with answering(reply) as address:
        found = route(address)
    assert found["route"][0].state == "ok"
    assert (found["coordinator"][0].state, found["coordinator"][0].code) == ("error", "W5-102")
    assert "tls" not in found


def test_a_coordinator_that_refuses_is_told_in_its_words() -> None:
    def refuse(connection: socket.socket) -> None:
        if connection.recv(1000):
            connection.sendall(encode(Refuse("W5-107", "this node speaks protocol 1", fix="install another")))

    with answering(refuse) as address:
        [finding] = route(address)["coordinator"]
    assert (finding.state, finding.code, finding.fix) == ("error", "W5-107", "install another")
    assert "this node speaks protocol 1" in finding.what


@pytest.mark.parametrize(
    ("frame", "code", "words"),
    [
        (b"W5\x09\x00" + bytes(12), "W5-107", "version 9"),
        (encode(Beat()).replace(b"beat", b"news"), "W5-120", "'news'"),
    ],
    ids=["another wire", "another word"],
)
def test_a_coordinator_of_another_version_is_told_from_a_stranger(
    frame: bytes, code: str, words: str
) -> None:
    def reply(connection: socket.socket) -> None:
        if connection.recv(1000):
            connection.sendall(frame)

    with answering(reply) as address:
        [finding] = route(address)["coordinator"]
    assert (finding.state, finding.code) == ("error", code)
    assert words in finding.what
    assert "both machines" in finding.fix


def test_tls_is_recognised(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=x -days 2"
    files = {"-keyout": tmp_path / "key.pem", "-out": tmp_path / "certificate.pem"}
    subprocess.run(
        [*make.split(), *(str(word) for pair in files.items() for word in pair)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    context.load_cert_chain(files["-out"], files["-keyout"])

    def greet(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1)

    with answering(greet) as address:
        found = route(address)
    # It may be ours: only a ticket would tell.
    assert (found["coordinator"][0].state, found["coordinator"][0].code) == ("warning", "W5-102")
    assert found["tls"][0].measured["tls"].startswith("TLSv1.")


# --- what a run would use of this machine ---------------------------------------------------------

JOB = """
import torch, w5xde
from torch import nn
from torch.utils.data import TensorDataset

def data():
    {data}
    return TensorDataset(torch.ones(64, 8), torch.zeros(64, 1))

job = w5xde.Job(
    model=lambda: nn.Sequential(nn.Linear(8, {width}), nn.Linear({width}, 1)),
    data=data,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda params: torch.optim.Adam(params),
)
"""
# 200,001 parameters: in sync mode 1.4 MB travel for each step.
WIDTH = 20_000
SLOW_BYTES_PER_SECOND = 1.25e6


def job_file(folder: Path, *, width: int = WIDTH, data: str = "pass") -> str:
    path = folder / f"train_{width}_{len(data)}.py"
    path.write_text(JOB.format(width=width, data=data))
    return str(path)


@contextlib.contextmanager
def slow_link(ticket: Ticket, bytes_per_second: float) -> Iterator[Ticket]:
    """Yield a ticket that leads to the same coordinator through a relay."""
    listener = open_listener()
    here, there = socket.socketpair()
    with listener, here, there:
        Line(here, "relay").say([HERE, ticket.addresses[0][1]])
        with forked(lambda: be_relay(Line(there, "test"), listener, bytes_per_second)):
            yield dataclasses.replace(ticket, addresses=((HERE, listener.getsockname()[1]),))


def meet(ticket: Ticket) -> Callable[[str], Finding]:
    """Check the way to a coordinator once; return a function that says what the doctor finds for a job."""
    target, met = there.Target(ticket.addresses, ticket), there.Met()
    found = list(there.check_route(target, met))
    assert met.welcome is not None, found

    def use(job: str) -> Finding:
        prospect = there.Prospect(load_job(job), 8, "cpu")
        return only(examine([Check("job", 60.0, lambda: there.check_use(target, met, prospect))]))

    return use


def test_on_a_slow_link_rounds_are_predicted_to_use_far_more_of_the_machine(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    with (
        coordinator(tmp_path, job, nodes=0, data="local") as run,
        slow_link(run.ticket, SLOW_BYTES_PER_SECOND) as slow,
    ):
        done = run_python(
            "-m", "w5xde", "doctor", slow.to_text(), job, "--port", "0", "--batch-size", "8", "--json"
        )
        report = json.loads(done.stdout)
        assert report["errors"] == 0, done.stderr
        link = report["checks"][-1]
        assert link["check"] == "link"
        found = link["measured"]
        assert found["parameters"] == 10 * WIDTH + 1
        assert found["parameter_bytes"] == 4 * found["parameters"]
        # Relay, coordinator and doctor share the cores with other tests.
        for way in ("down", "up"):
            assert SLOW_BYTES_PER_SECOND / 4 < found[f"{way}_bytes_per_second"] < SLOW_BYTES_PER_SECOND * 2
            assert found[f"{way}_bound"] == "about"
        assert found["round_trip_seconds"] > 0
        assert found["step_seconds"] > 0
        assert found["batch_bytes"] == 0
        assert found["share_sync"] < found["share_rounds"]
        assert found["advice"] == "rounds"
        assert "use --mode rounds" in link["what"]
        assert "--mode rounds" in done.stderr
        # Nobody joined, and the ticket is as it was.
        assert "admitted" not in run.ledger_text()
        assert run.process.text.count("it came to look, and not to work") <= 1


def test_a_run_in_rounds_is_told_what_it_uses_and_another_model_or_missing_data_are_told(
    tmp_path: Path,
) -> None:
    with coordinator(tmp_path, job_file(tmp_path), nodes=0, mode="rounds") as run:
        use = meet(run.ticket)
        found = use(job_file(tmp_path))
        assert (found.check, found.measured["batch_bytes"]) == ("link", 8 * (8 + 1) * 4)
        assert "this run uses" in found.what
        assert f"once rounds have {ROUND_STEPS_USUAL} steps" in found.what
        other = use(job_file(tmp_path, width=5))
        assert (other.check, other.state, other.code) == ("job", "error", "W5-201")
        assert "your model differs from the run's" in other.what
        missing = use(job_file(tmp_path, data="raise FileNotFoundError('images.npy')"))
        assert (missing.check, missing.state, missing.code) == ("job", "warning", "W5-202")
        assert "images.npy" in missing.what


def test_a_probe_of_a_coordinator_that_hangs_up_is_told() -> None:
    with answering(lambda connection: None) as address:
        host, port = address.split(":")
        with pytest.raises(JoinError, match="cannot be measured") as caught:
            measure_link(
                lambda: socket.create_connection((host, int(port))), parse(clear_ticket(address)), 0.001
            )
    assert "same version" in caught.value.fix


def test_a_job_that_cannot_be_loaded_or_has_no_ticket_is_refused_before_anything_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closed_port() as address:
        ticket = clear_ticket(address)
        assert main(["doctor", ticket, str(tmp_path / "nothing.py")]) == JobError.exit_code
        told = capsys.readouterr()
        assert told.err.startswith("error[W5-206]: there is no job file")
        assert told.out == ""
        assert main(["doctor", address, job_file(tmp_path)]) == UsageError.exit_code
    told = capsys.readouterr()
    assert told.err.startswith("error[W5-210]: what a run of")
    assert "w5xde doctor @ticket" in told.err


def test_nothing_is_predicted_for_a_coordinator_that_was_not_met(tmp_path: Path) -> None:
    with closed_port() as address:
        target = there.target_of(clear_ticket(address))
        prospect = there.Prospect(load_job(job_file(tmp_path)), 8, "cpu")
        found = list(examine(there.coordinator_checks(target, prospect)))
    assert [each.check for each in found] == ["route"]


# --- this machine ---------------------------------------------------------------------------------


def test_a_port_in_use_is_told_with_its_user() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = only(here.check_port("127.0.0.1", taken.getsockname()[1]))
    assert (finding.state, finding.code) == ("warning", "W5-110")
    assert f"(pid {os.getpid()})" in finding.what
    assert "--port" in finding.fix


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    finding = only(here.check_port("203.0.113.7", free_port()))
    assert (finding.state, finding.code) == ("error", "W5-110")


@pytest.mark.parametrize("place", ["file", "/proc"], ids=["a file", "no folder for files"])
def test_a_folder_that_cannot_be_written_is_told(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = only(here.check_disk(str(tmp_path / place / "runs")))
    assert (finding.state, finding.code) == ("error", "W5-404")
    assert "--runs" in finding.fix


def test_little_room_is_a_warning_and_hardly_any_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(here, "DISK_BYTES_FEW", 2**80)
    assert only(here.check_disk(str(tmp_path))).state == "warning"
    monkeypatch.setattr(here, "DISK_BYTES_MIN", 2**80)
    assert only(here.check_disk(str(tmp_path))).state == "error"


def test_a_slow_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "SYNC_SECONDS_MANY", 0.0)
    finding = only(here.check_disk(str(tmp_path)))
    assert finding.state == "warning"
    assert "--durability step" in finding.fix


def test_a_clock_of_long_ago_and_one_that_is_not_the_disks_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert only(here.check_clock(str(tmp_path))).state == "ok"
    behind = time.time() - 3600
    with monkeypatch.context() as patched:
        patched.setattr(here.time, "time", lambda: behind)
        finding = only(here.check_clock(str(tmp_path)))
    assert finding.state == "warning"
    assert "3600 s ahead of this machine's clock" in finding.what
    monkeypatch.setattr(here, "YEAR_MIN", 9999)
    assert only(here.check_clock(str(tmp_path))).state == "error"


@pytest.mark.parametrize(
    ("version", "state"),
    [((3, 10, 14), "error"), ((3, 11, 4), "warning"), ((3, 11, 5), "ok"), ((3, 14, 0), "ok")],
)
def test_an_old_python_is_told(version: tuple[int, ...], state: str) -> None:
    assert only(here.check_python(version)).state == state


def test_few_open_files_are_told() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        finding = only(here.check_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.state == "warning"
    assert "ulimit -n" in finding.fix


def test_memory_is_what_the_container_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "cgroup.controllers").touch()
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN_GROUPS", tmp_path / "own")
    assert only(here.check_memory()).state in ("ok", "warning")
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("200000000\n")
    finding = only(here.check_memory())
    assert (finding.state, finding.measured["available_bytes"]) == ("error", 100_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert only(here.check_memory()).measured["available_bytes"] > 100_000_000


def test_without_a_network_only_this_machine_reaches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "own_addresses", lambda: ["127.0.0.1"])
    assert only(here.check_addresses()).state == "warning"


def test_a_torch_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = only(here.check_torch())
    assert finding.state == "error"
    assert "pip install torch" in finding.fix


def test_a_device_that_multiplies_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_by_hand", lambda left: left)
    assert only(here.check_torch()).state == "error"
    finding = only(here.check_device("cpu"))
    assert (finding.state, finding.code) == ("error", "W5-301")


def test_every_check_has_a_limit() -> None:
    checks = here.machine_checks(Settings()) + there.coordinator_checks(there.Target((("127.0.0.1", 1),)))
    assert all(0 < check.seconds_max <= 120 for check in checks)
