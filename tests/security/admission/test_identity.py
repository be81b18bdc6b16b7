"""Keys and credentials are their owner's alone, survive a crash, and are never made anew by accident."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from secrets import token_hex

import pytest
from cryptography import x509

from tests.security.admission.test_ticket import make
from w5xde.errors import StorageError
from w5xde.runtime.admission import private_files as private
from w5xde.runtime.admission.credentials import Credential, NodeCredentials, pool_of
from w5xde.runtime.admission.identity import RunIdentity
from w5xde.ticket import Secret

RUN = "0123456789abcdef"
CREDENTIAL = Credential(b"01234567", Secret(b"thirty-two bytes that are secret"))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def trouble(do) -> StorageError:
    with pytest.raises(StorageError) as caught:
        do()
    assert caught.value.fix
    return caught.value


# --- where -----------------------------------------------------------------------------------------


def test_the_state_folder_is_named_assumed_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert private.state_folder({"W5XDE_STATE": "/s", "XDG_STATE_HOME": "/x"}) == Path("/s")
    assert private.state_folder({"W5XDE_STATE": "~/s"}) == tmp_path / "s"
    assert private.state_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/w5xde")
    assert private.state_folder({"XDG_STATE_HOME": "relative"}) == tmp_path / ".local/state/w5xde"
    assert private.state_folder({}) == tmp_path / ".local/state/w5xde"


# --- files -----------------------------------------------------------------------------------------


def test_files_and_folders_are_their_owners_alone_whatever_the_umask(state):
    before = os.umask(0)
    try:
        identity = RunIdentity.load_or_create(RUN, state)
        credentials = NodeCredentials("pool", state)
        credentials.save(CREDENTIAL)
        credentials.close()
    finally:
        os.umask(before)
    for path in [state, *state.rglob("*")]:
        assert mode(path) == (0o700 if path.is_dir() else 0o600), path
    assert identity.file.parent == state / "runs"


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    file = tmp_path / "file"
    private.replace(file, b"one")
    private.replace(file, b"two")
    assert private.read(file) == b"two"
    (tmp_path / ".file.new").symlink_to(tmp_path / "elsewhere")
    private.replace(file, b"three")
    assert private.read(file) == b"three"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_replacement_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "file"
    private.replace(file, b"one")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    error = trouble(lambda: private.replace(file, b"two"))
    assert error.code == "W5-411"
    assert "No space left" in error.what
    assert private.read(file) == b"one"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_links_are_not_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    private.replace(target, b"theirs")
    link.symlink_to(target)
    assert trouble(lambda: private.read(link)).code == "W5-410"
    assert trouble(lambda: private.hold(link)).code == "W5-410"
    private.replace(link, b"ours")
    assert private.read(target) == b"theirs"
    assert not link.is_symlink()
    folder_link = tmp_path / "folder-link"
    folder_link.symlink_to(tmp_path)
    assert trouble(lambda: private.make_folder(folder_link)).code == "W5-410"


def test_another_users_file_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    private.replace(file, b"x")
    we = os.geteuid()
    # Only root can give files away; but anybody can be somebody else.
    monkeypatch.setattr(os, "geteuid", lambda: we + 1)
    assert "another user" in trouble(lambda: private.read(file)).what


def test_a_lock_that_is_held_too_long_is_an_error_not_a_wait(tmp_path):
    with private.locked(tmp_path / "lock"):
        with pytest.raises(StorageError) as caught, private.locked(tmp_path / "lock", seconds=0.05):
            pytest.fail("two have it")
        assert caught.value.code == "W5-412"
    with private.locked(tmp_path / "lock", seconds=0):
        pass


def test_a_file_of_any_size_is_not_read(tmp_path):
    file = tmp_path / "file"
    private.replace(file, b"")
    os.truncate(file, private.BYTES_MAX + 1)
    assert trouble(lambda: private.read(file)).code == "W5-411"


# --- a run -----------------------------------------------------------------------------------------


def test_the_same_run_has_the_same_identity_after_a_crash_and_another_run_another(state):
    first = RunIdentity.load_or_create(RUN, state)
    again = RunIdentity.load_or_create(RUN, state)
    other = RunIdentity.load_or_create(token_hex(8), state)
    assert first.is_new
    assert not again.is_new
    assert (again.certificate, again.fingerprint) == (first.certificate, first.fingerprint)
    assert len(first.fingerprint) == 32
    assert other.fingerprint != first.fingerprint


def test_the_certificate_never_expires_and_signs_no_others(state):
    certificate = x509.load_der_x509_certificate(RunIdentity.load_or_create(RUN, state).certificate)
    assert certificate.not_valid_before_utc.year == 1970
    assert certificate.not_valid_after_utc.year == 9999
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert RUN in certificate.subject.rfc4514_string()


def test_run_ids_are_random_and_nothing_else_is_one(state):
    assert len({token_hex(8) for _ in range(100)}) == 100
    for wrong in ("", "../../etc/passwd", "0123456789ABCDEF", RUN + "0", RUN + "\n"):
        assert trouble(lambda wrong=wrong: RunIdentity.load_or_create(wrong, state)).code == "W5-413"
    assert not state.exists()


@pytest.mark.parametrize("wrong", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused_and_not_mended(state, wrong):
    file = RunIdentity.load_or_create(RUN, state).file
    file.chmod(wrong)
    error = trouble(lambda: RunIdentity.load_or_create(RUN, state))
    assert error.code == "W5-410"
    assert f"{wrong:04o}" in error.what
    assert f"chmod 600 {file}" in error.fix
    assert mode(file) == wrong


@pytest.mark.parametrize("part", ["", "runs"])
def test_a_folder_that_others_can_look_into_is_refused(state, part):
    RunIdentity.load_or_create(RUN, state)
    (state / part).chmod(0o755)
    error = trouble(lambda: RunIdentity.load_or_create(RUN, state))
    assert error.code == "W5-410"
    assert "chmod 700" in error.fix


def test_a_damaged_identity_is_refused_and_kept(state):
    file = RunIdentity.load_or_create(RUN, state).file
    other = RunIdentity.load_or_create(token_hex(8), state).file
    whole, foreign = file.read_bytes(), other.read_bytes()
    remade = RunIdentity.load_or_create(RUN, state / "elsewhere").file.read_bytes()
    at = whole.index(b"-----BEGIN CERTIFICATE")
    for damaged in [
        b"",
        whole[:at],
        whole[at:],
        whole[: at // 2] + whole[at:],
        whole[:-200],
        whole[:at] + foreign[foreign.index(b"-----BEGIN CERTIFICATE") :],
        whole[:at] + remade[remade.index(b"-----BEGIN CERTIFICATE") :],
        foreign,
        os.urandom(500),
    ]:
        file.write_bytes(damaged)
        error = trouble(lambda: RunIdentity.load_or_create(RUN, state))
        assert error.code == "W5-413"
        assert "new tickets" in error.fix
        assert file.read_bytes() == damaged
        assert "PRIVATE" not in " ".join(error.lines())
    file.write_bytes(whole)
    assert not RunIdentity.load_or_create(RUN, state).is_new


def test_several_who_come_at_once_have_one_identity(state):
    code = (
        "import sys; from pathlib import Path; from w5xde.runtime.admission.identity import RunIdentity\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        f"print(RunIdentity.load_or_create({RUN!r}, Path(sys.argv[1])).fingerprint.hex())"
    )
    command = [sys.executable, "-c", code, str(state)]
    several = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in several:
        assert process.stdout.readline() == "ready\n"
    for process in several:
        process.stdin.write("\n")
        process.stdin.flush()
    assert len({process.communicate(timeout=20)[0] for process in several}) == 1


def test_the_identity_shows_no_key(state):
    identity = RunIdentity.load_or_create(RUN, state)
    key = identity.file.read_bytes().splitlines()[1]
    assert key.decode() not in repr(identity)


# --- a node ----------------------------------------------------------------------------------------


def test_a_node_finds_its_credential_again_until_it_forgets_it(state):
    credentials = NodeCredentials("pool", state)
    assert credentials.load() is None
    credentials.save(CREDENTIAL)
    credentials.close()
    again = NodeCredentials("pool", state)
    assert again.load() == CREDENTIAL
    again.forget()
    again.forget()
    assert again.load() is None
    again.close()
    again.close()


def test_nodes_of_one_machine_never_share_a_credential(state):
    one, two = NodeCredentials("pool", state), NodeCredentials("pool", state)
    elsewhere = NodeCredentials("other", state)
    one.save(CREDENTIAL)
    assert two.load() is None
    assert elsewhere.load() is None
    two.save(Credential(b"76543210", CREDENTIAL.secret))
    one.close()
    three = NodeCredentials("pool", state)
    assert three.load() == CREDENTIAL
    for each in (two, three, elsewhere):
        each.close()


def test_a_place_is_free_again_when_its_process_is_killed_though_a_child_lives_on(state):
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from w5xde.runtime.admission.credentials import NodeCredentials\n"
        "credentials = NodeCredentials('pool', Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(state)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = int(process.stdout.readline())
    try:
        taken = NodeCredentials("pool", state)
        taken.save(CREDENTIAL)
        taken.close()
        assert sorted(path.name for path in (state / "nodes/pool").glob("*.json")) == ["01.json"]
        process.kill()
        process.wait(timeout=10)
        free = NodeCredentials("pool", state)
        assert free.load() is None
        free.close()
    finally:
        os.kill(child, 9)
        process.stdout.close()


def test_a_credential_belongs_to_the_run_whose_certificate_the_ticket_pins():
    assert pool_of(make(id=b"12345678")) == pool_of(make(id=b"87654321"))
    assert pool_of(make()) != pool_of(make(seed=2))
    clear = make(fingerprint=b"", is_clear=True, id=b"12345678")
    assert pool_of(clear) == "ticket-3132333435363738"


def test_a_damaged_credential_is_an_error(state):
    credentials = NodeCredentials("pool", state)
    credentials.save(CREDENTIAL)
    file = state / "nodes/pool/00.json"
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole.replace(b"3", b"4", 1), b"{}"):
        file.write_bytes(damaged)
        error = trouble(credentials.load)
        assert error.code == "W5-413"
        assert CREDENTIAL.secret.reveal().hex() not in " ".join(error.lines())
    file.write_bytes(whole)
    file.chmod(0o644)
    assert trouble(credentials.load).code == "W5-410"
    credentials.close()


def test_a_credential_shows_no_secret():
    assert "***" in repr(CREDENTIAL)
    assert "thirty" not in repr(CREDENTIAL)
