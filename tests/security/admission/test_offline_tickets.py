"""Secrets that exist before the run: an identity in a folder of the user's, and the tickets made for it."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import JOBS, command, forked
from tests.security.admission.test_identity import RUN, trouble
from w5xde.cli.main import main
from w5xde.cli.tickets import Wanted, ticket_offline
from w5xde.config import Settings
from w5xde.errors import NOT_OVER, StorageError, UsageError, W5xdeError
from w5xde.runtime.admission.gatekeeper import Gatekeeper
from w5xde.runtime.admission.identity import RunIdentity
from w5xde.runtime.admission.offline_tickets import KnownTicket, make_offline
from w5xde.runtime.admission.register import Refused, TicketRegister
from w5xde.runtime.net import tls
from w5xde.runtime.net.listener import ListenAddress
from w5xde.specs.setting_error import SettingError
from w5xde.ticket import Ticket, parse

NOW = time.time()
HERE, EVERYWHERE = "127.0.0.1", "0.0.0.0"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return folder


def made(keys: Path, host: str = HERE, port: int = 5555, **limits: Any) -> Ticket:
    """Make a ticket before the run, and write it beside the identity."""
    identity = RunIdentity.load_given(keys)
    ticket = make_offline(keys, identity.fingerprint, [(host, port)], NOW, **limits)
    (keys / "ticket").write_text(ticket.to_text())
    return ticket


def gatekeeper_of(run: Path, keys: Path, *, host: str = HERE, port: int = 5555, **more: Any) -> Gatekeeper:
    """Open a gatekeeper as a coordinator does that is given both."""
    given = {"identity": str(keys), "known_ticket": f"@{keys / 'ticket'}", "host": host, **more}
    gatekeeper = Gatekeeper(run, RUN, Settings(**given))
    gatekeeper.read_known_ticket()
    gatekeeper.guard([ListenAddress(socket.AF_INET, host)])
    gatekeeper.open(host, port)
    gatekeeper.close()
    return gatekeeper


def refused(work: Callable[[], object]) -> W5xdeError:
    with pytest.raises(W5xdeError) as caught:
        work()
    assert caught.value.fix
    return caught.value


def admit(run: Path, ticket: Ticket) -> object:
    return TicketRegister(run).admit_ticket(ticket.id, ticket.secret.reveal(), time.time(), name="desk")


# --- the identity ---------------------------------------------------------------------------------


def test_an_identity_is_made_once_and_belongs_to_its_owner_alone(keys: Path) -> None:
    before = os.umask(0)
    try:
        first = RunIdentity.load_given(keys)
    finally:
        os.umask(before)
    assert (first.is_new, RunIdentity.load_given(keys).is_new) == (True, False)
    assert RunIdentity.load_given(keys).fingerprint == first.fingerprint
    assert [path.name for path in keys.iterdir()] == ["identity.pem"]
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert stat.S_IMODE(first.file.stat().st_mode) == 0o600


def test_several_who_make_it_at_once_have_one(keys: Path) -> None:
    def work() -> None:
        print(RunIdentity.load_given(keys).fingerprint.hex())

    with forked(work) as one, forked(work) as two, forked(work) as three:
        assert [each.wait() for each in (one, two, three)] == [0, 0, 0]
        assert one.text == two.text == three.text != ""


def test_a_file_system_without_links_has_identities_too(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = RunIdentity.load_given(keys)
    assert RunIdentity.load_given(keys).fingerprint == first.fingerprint
    assert [path.name for path in keys.iterdir()] == ["identity.pem"]


def test_a_run_takes_its_identity_along_from_the_state_folder(keys: Path, tmp_path: Path) -> None:
    own = RunIdentity.load_or_create(RUN, tmp_path / "state")
    assert RunIdentity.load_given(keys, RUN, tmp_path / "state").fingerprint == own.fingerprint
    # And from then on the folder is what counts.
    assert RunIdentity.load_given(keys).fingerprint == own.fingerprint
    other = RunIdentity.load_given(tmp_path / "other", "f" * 16, tmp_path / "state")
    assert other.fingerprint != own.fingerprint


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620, 0o602, 0o444])
def test_a_key_that_others_can_read_or_that_a_group_can_write_is_refused(keys: Path, mode: int) -> None:
    file = RunIdentity.load_given(keys).file
    file.chmod(mode)
    error = trouble(lambda: RunIdentity.load_given(keys))
    assert error.code == "W5-410"
    assert f"mode {mode:04o}" in error.what
    assert stat.S_IMODE(file.stat().st_mode) == mode


def as_another(work: Callable[[], object]) -> Callable[[], None]:
    """As a user who neither owns what root has made nor may write it, if the tests run as root."""

    def run() -> None:
        if os.geteuid() == 0:
            os.setgroups([2000])
            os.setresgid(2000, 2000, 2000)
            os.setresuid(65534, 65534, 65534)
        work()

    return run


@pytest.fixture
def mounted(keys: Path) -> Iterator[Path]:
    """A folder as Kubernetes mounts a Secret with `defaultMode: 0440` and an `fsGroup`: links, not ours."""
    ticket = made(keys, uses=3)
    # Not in pytest's folder, which nobody else may enter.
    mount = Path(tempfile.mkdtemp(prefix="w5xde-secret-"))
    data = mount / "..2026_11_16"
    data.mkdir()
    (mount / "..data").symlink_to(data.name)
    for name in ("identity.pem", "offline-tickets.json", "ticket"):
        (data / name).write_bytes((keys / name).read_bytes())
        (data / name).chmod(0o440)
        (mount / name).symlink_to(f"..data/{name}")
        if os.geteuid() == 0:
            os.chown(data / name, 0, 2000)
    for folder in (data, mount):
        folder.chmod(0o555)
    assert ticket == parse((mount / "ticket").read_text())
    yield mount
    for folder in (mount, data):
        folder.chmod(0o700)
    shutil.rmtree(mount)


def test_a_mounted_secret_is_used_and_nothing_is_written_there(mounted: Path, keys: Path) -> None:
    expected = RunIdentity.load_given(keys).fingerprint.hex()

    def work() -> None:
        identity = RunIdentity.load_given(mounted)
        tls.server_context(identity.file)
        known = KnownTicket(f"@{mounted / 'ticket'}", mounted)
        known.require_identity(identity.fingerprint)
        print(identity.fingerprint.hex(), known.row(NOW).uses_max)

    before = sorted(mounted.rglob("*"))
    # What it needs is loaded before it becomes a user who may not read the interpreter's own files.
    assert KnownTicket(f"@{keys / 'ticket'}", keys).row(NOW).uses_max == 3
    with forked(as_another(work)) as process:
        assert process.wait() == 0, process.text
    assert process.text.split() == [expected, "3"]
    assert sorted(mounted.rglob("*")) == before


def test_a_folder_that_cannot_be_written_and_has_no_identity_says_how_to_make_one(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.mkdir()
    if os.geteuid() == 0:
        # Root may write anywhere but here.
        keys = Path("/proc/self/fdinfo")
    else:
        keys.chmod(0o500)
    error = refused(lambda: RunIdentity.load_given(keys))
    assert (type(error), error.code) == (StorageError, "W5-123")
    assert "w5xde ticket new --offline --identity" in error.fix


def test_a_damaged_or_foreign_key_is_refused_and_kept(keys: Path, tmp_path: Path) -> None:
    file = RunIdentity.load_given(keys).file
    whole, other = file.read_bytes(), RunIdentity.load_given(tmp_path / "other").file.read_bytes()
    at, begin = whole.index(b"-----BEGIN CERTIFICATE"), other.index(b"-----BEGIN CERTIFICATE")
    for damaged in (b"", whole[:at], whole[at:], whole[:-200], whole[:at] + other[begin:], os.urandom(500)):
        file.write_bytes(damaged)
        error = trouble(lambda: RunIdentity.load_given(keys))
        assert error.code == "W5-413"
        assert "name another folder" in error.fix
        assert file.read_bytes() == damaged
        assert "PRIVATE" not in " ".join(error.lines())


def test_a_certificate_of_another_program_is_no_identity(keys: Path) -> None:
    from w5xde.runtime.admission import identity

    keys.mkdir()
    (keys / "identity.pem").write_bytes(identity.make_certificate("mail.example.org"))
    (keys / "identity.pem").chmod(0o600)
    assert "another program" in trouble(lambda: RunIdentity.load_given(keys)).what


def test_what_is_no_file_is_no_identity(keys: Path) -> None:
    file = keys / "identity.pem"
    file.mkdir(parents=True)
    assert trouble(lambda: RunIdentity.load_given(keys)).code == "W5-410"
    file.rmdir()
    os.mkfifo(file, 0o600)
    assert trouble(lambda: RunIdentity.load_given(keys)).code == "W5-410"
    file.unlink()
    file.touch(0o600)
    os.truncate(file, 2**40)
    assert trouble(lambda: RunIdentity.load_given(keys)).code == "W5-411"
    assert trouble(lambda: RunIdentity.load_given(file)).code == "W5-411"


# --- tickets for it -------------------------------------------------------------------------------


def test_a_ticket_that_was_made_before_admits_as_many_as_it_was_made_for(keys: Path, run: Path) -> None:
    ticket = made(keys, uses=2)
    gatekeeper = gatekeeper_of(run, keys)
    assert (gatekeeper.ticket, gatekeeper.ticket_shown) == (ticket, f"@{keys / 'ticket'}")
    assert gatekeeper.warnings == []
    [row] = TicketRegister(run).tickets()
    assert (row.id, row.label, row.uses_max) == (ticket.id.hex(), "made before the run", 2)
    admit(run, ticket)
    # A restart forgets neither its uses ...
    gatekeeper_of(run, keys, resume="mine")
    admit(run, ticket)
    with pytest.raises(Refused, match="used up"):
        admit(run, ticket)
    # ... nor that it was revoked.
    TicketRegister(run).revoke(ticket.id.hex(), NOW)
    [warning] = gatekeeper_of(run, keys, resume="mine").warnings
    assert warning.startswith("W5-125: ")
    assert len(TicketRegister(run).tickets()) == 1


def test_without_its_row_a_ticket_admits_any_number_until_its_end(keys: Path, run: Path) -> None:
    ticket = made(keys, uses=1, lifetime_seconds=3600)
    (keys / "offline-tickets.json").unlink()
    gatekeeper_of(run, keys)
    [row] = TicketRegister(run).tickets()
    assert (row.uses_max, row.expires_at) == (0, ticket.expires_at)
    for _ in range(3):
        admit(run, ticket)


def test_no_secret_is_kept_anywhere_but_in_the_ticket(keys: Path, run: Path) -> None:
    ticket = made(keys)
    gatekeeper_of(run, keys)
    secret = ticket.secret.reveal()
    for path in [*run.rglob("*"), *(each for each in keys.iterdir() if each.name != "ticket")]:
        assert secret.hex().encode() not in path.read_bytes()
        assert ticket.to_text().encode() not in path.read_bytes()
        assert secret not in path.read_bytes()


def test_a_ticket_of_another_identity_is_refused(keys: Path, run: Path, tmp_path: Path) -> None:
    made(keys)
    made(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ticket", keys / "ticket")
    error = refused(lambda: gatekeeper_of(run, keys))
    assert (type(error), error.code) == (UsageError, "W5-124")
    assert "is not for the identity in" in error.what


def test_a_ticket_with_another_secret_than_its_own_is_refused(keys: Path, run: Path) -> None:
    ticket = made(keys, uses=1)
    rows = json.loads((keys / "offline-tickets.json").read_text())["sealed"]
    assert rows["tickets"][ticket.id.hex()]["sha256"] == ticket.secret.digest().hex()
    from dataclasses import replace

    from w5xde.ticket import Secret

    (keys / "ticket").write_text(replace(ticket, secret=Secret(bytes(16))).to_text())
    assert refused(lambda: gatekeeper_of(run, keys)).code == "W5-124"


def test_damaged_rows_are_refused_because_they_limit_uses(keys: Path, run: Path) -> None:
    made(keys, uses=1)
    rows = keys / "offline-tickets.json"
    rows.write_bytes(rows.read_bytes().replace(b'"uses_max":1', b'"uses_max":9'))
    assert refused(lambda: gatekeeper_of(run, keys)).code == "W5-413"
    assert refused(lambda: made(keys)).code == "W5-413"
    rows.chmod(0o644)
    assert refused(lambda: gatekeeper_of(run, keys)).code == "W5-410"


def test_an_expired_ticket_is_refused_for_a_new_run_and_told_for_one_that_goes_on(
    keys: Path, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made(keys, lifetime_seconds=3600)
    gatekeeper_of(run, keys)
    monkeypatch.setattr(time, "time", lambda: NOW + 7200)
    [warning] = gatekeeper_of(run, keys, resume="mine").warnings
    assert warning.startswith("W5-125: the ticket in @")
    assert "expired 1 h ago; nodes that joined before can come back" in warning
    other = tmp_path / "other"
    other.mkdir()
    error = refused(lambda: gatekeeper_of(other, keys))
    assert (type(error), error.code) == (UsageError, "W5-125")


def test_a_ticket_for_other_machines_needs_a_coordinator_that_they_reach(keys: Path, run: Path) -> None:
    made(keys, host="trainer.example.org")
    error = refused(lambda: gatekeeper_of(run, keys))
    assert (type(error), error.code) == (UsageError, "W5-126")
    assert "--host 0.0.0.0" in error.fix
    assert gatekeeper_of(run, keys, host=EVERYWHERE).warnings == []


def test_another_port_is_told_because_something_may_forward_it(keys: Path, run: Path) -> None:
    made(keys, port=5555)
    [warning] = gatekeeper_of(run, keys, port=6000).warnings
    assert warning.startswith("W5-126: ")
    assert "names port 5555, and this run listens on 6000" in warning


def test_a_run_with_another_identity_than_before_says_so(keys: Path, run: Path, tmp_path: Path) -> None:
    made(keys)
    gatekeeper_of(run, keys)
    made(tmp_path / "other")
    [warning] = gatekeeper_of(run, tmp_path / "other", resume="mine").warnings
    assert warning.startswith("W5-127: this run had another identity before")


def test_with_an_identity_this_machine_alone_is_encrypted_too(keys: Path, run: Path) -> None:
    gatekeeper = Gatekeeper(run, RUN, Settings(identity=str(keys)))
    assert gatekeeper.guard([ListenAddress(socket.AF_INET, HERE)]) is not None
    gatekeeper.open(HERE, 5555)
    assert gatekeeper.ticket is not None
    assert (gatekeeper.ticket.is_clear, gatekeeper.is_exposed) == (False, False)
    assert gatekeeper.ticket.fingerprint == RunIdentity.load_given(keys).fingerprint
    gatekeeper.forget_identity()
    gatekeeper.close()
    assert (keys / "identity.pem").exists(), "only an identity of ours is thrown away"


@pytest.mark.parametrize(
    "more", [{"insecure": True}, {"tls_cert": "a", "tls_key": "b"}, {"tls_ca": "a"}, {"new_identity": True}]
)
def test_an_identity_and_another_one_contradict(keys: Path, run: Path, more: dict[str, Any]) -> None:
    made(keys)
    error = refused(lambda: gatekeeper_of(run, keys, **more))
    assert (type(error), error.code) == (UsageError, "W5-505")


def test_the_ticket_of_a_start_has_the_limits_that_its_settings_say(keys: Path, run: Path) -> None:
    made(keys)
    limits: list[tuple[str, int | str]] = [("24h", 100), ("never", "any"), ("90", 7)]
    found = []
    for lifetime, uses in limits:
        more: dict[str, Any] = {"ticket_lifetime": lifetime, "ticket_uses": uses}
        file = run.parent / "ticket-of-the-run"
        gatekeeper_of(run, keys, ticket_file=str(file), **more)
        fresh = parse(file.read_text())
        row = next(row for row in TicketRegister(run).tickets() if row.id == fresh.id.hex())
        found.append((row.expires_at and math.ceil(row.expires_at - row.made_at), row.uses_max))
    assert found == [(86400, 100), (0, 0), (90, 7)]
    for bad in ({"ticket_lifetime": "soon"}, {"ticket_uses": "none"}, {"ticket_uses": 0}):
        with pytest.raises(SettingError, match="is not a"):
            Settings(**bad)


def test_a_ticket_file_gets_a_ticket_of_now_beside_the_one_of_before(keys: Path, run: Path) -> None:
    ticket = made(keys, port=5555)
    file = run.parent / "ticket"
    gatekeeper = gatekeeper_of(run, keys, port=6000, ticket_file=str(file))
    fresh = parse(file.read_text())
    assert (fresh.addresses, fresh.fingerprint) == (((HERE, 6000),), ticket.fingerprint)
    assert gatekeeper.ticket == ticket
    assert TicketRegister(run).admit_ticket(fresh.id, fresh.secret.reveal(), time.time(), name="desk").secret


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_a_private_file_and_shows_no_secret(
    keys: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "my ticket"
    words = ["ticket", "new", "--offline", "--identity", str(keys), "--advertise", "a.example, 10.0.0.1"]
    assert main([*words, "--port", "7777", "--lifetime", "never", "--uses", "any", "--out", str(out)]) == 0
    told = capfd.readouterr().out
    ticket = parse(out.read_text())
    assert ticket.addresses == (("a.example", 7777), ("10.0.0.1", 7777))
    assert ticket.expires_at == 0
    assert ticket.fingerprint == RunIdentity.load_given(keys).fingerprint
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert told.splitlines()[0] == f"w5xde join '@{out}'"
    assert "any number of nodes, for ever" in told
    assert ticket.to_text() not in told
    assert main([*words, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert parse(facts["ticket"]).addresses == (("a.example", 5555), ("10.0.0.1", 5555))
    assert (facts["identity_is_new"], facts["uses_max"]) == (False, 100)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--offline"], "makes a ticket for an identity"),
        (["--offline", "--identity", "k"], "at which machine"),
        (["tuesday", "--offline"], "leave out RUN"),
        (["--identity", "k"], "--identity is for tickets without a run"),
        (["latest", "--port", "5"], "--port is for tickets without a run"),
        ([], "for which run?"),
        (["--offline", "--identity", "k", "--advertise", "a b"], "neither an IP address nor a host name"),
        (["--offline", "--identity", "k", "--advertise", "a", "--port", "0"], "one port from 1 to 65535"),
        (["--offline", "--identity", "k", "--advertise", "a", "--uses", "0"], "is not a number of uses"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ticket", "new", *words]) == UsageError.exit_code
    assert told in capsys.readouterr().err


def test_an_offline_ticket_names_what_to_start(keys: Path) -> None:
    told = ticket_offline(keys, [("a.example", 5555)], NOW, Wanted(out=str(keys / "t"))).lines
    assert f"identity {RunIdentity.load_given(keys).fingerprint.hex()[:16]}… in {keys} (new)" in told
    serve = f"w5xde serve JOB --host 0.0.0.0 --port 5555 --identity {keys} --ticket @{keys / 't'}"
    assert f"to serve it:  {serve}" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"known_ticket": "w5secretsecret", "identity": "keys"}, "must name the file that holds the ticket"),
        ({"known_ticket": "@ticket"}, "was made for an identity"),
    ],
)
def test_a_setting_never_holds_the_ticket_itself(given: dict[str, str], told: str) -> None:
    from w5xde.setting_sources import resolve

    with pytest.raises(UsageError, match=told) as caught:
        resolve("serve", given)
    assert caught.value.code == "W5-210"
    assert "secretsecret" not in " ".join(caught.value.lines())


def test_a_coordinator_that_is_refused_its_key_leaves_nothing_behind(keys: Path, tmp_path: Path) -> None:
    made(keys)
    (keys / "identity.pem").chmod(0o644)
    words = ["serve", f"{JOBS}:job", "--port", "0", "--identity", str(keys), "--runs", str(tmp_path / "runs")]
    with command(*words, is_fresh=True) as served:
        assert served.wait() == StorageError.exit_code
    assert "error[W5-410]: " in served.text
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_given_ticket_is_not_printed_and_leads_to_its_port(keys: Path, tmp_path: Path) -> None:
    from tests.sockets import free_port

    ticket = made(keys, port=free_port())
    words = ["train", f"{JOBS}:slow", "--nodes", "1", "--epochs", "9999", "--runs", str(tmp_path / "runs")]
    words += ["--identity", str(keys), "--ticket", f"@{keys / 'ticket'}", "--name", "mine"]
    with command(*words) as served:
        served.wait_for(f"listening on 127.0.0.1:{ticket.addresses[0][1]}")
        assert served.wait_for("to join:").split() == ["to", "join:", "w5xde", "join", f"@{keys / 'ticket'}"]
        served.wait_for("local-1 joined")
        served.interrupt()
        assert served.wait() == NOT_OVER, served.text
    assert ticket.to_text() not in served.text
    for path in (tmp_path / "runs").rglob("*"):
        assert not path.is_file() or ticket.to_text().encode() not in path.read_bytes()
