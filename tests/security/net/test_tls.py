"""Nothing is said to who cannot prove to have made the ticket, and nothing is heard outside TLS 1.3."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import w5xde
from w5xde.errors import JoinError, UsageError
from w5xde.runtime.admission.identity import RunIdentity
from w5xde.runtime.net import tls

HERE = "127.0.0.1"
SECONDS = 10.0


@pytest.fixture
def ours(tmp_path: Path) -> RunIdentity:
    return RunIdentity.load_or_create(token_hex(8), tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> RunIdentity:
    return RunIdentity.load_or_create(token_hex(8), tmp_path / "theirs")


@dataclass
class Heard:
    """What a server noticed of all its connections."""

    port: int = 0
    # Handshakes that succeeded, and application bytes.
    made: int = 0
    data: bytes = b""
    versions: list[str | None] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Listener(asyncio.Protocol):
    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    def connection_made(self, transport):
        self.transport = transport
        self.heard.made += 1
        seen = transport.get_extra_info("ssl_object")
        self.heard.versions.append(seen and seen.version())

    def data_received(self, data):
        self.heard.data += data
        self.transport.write(b"welcome")

    def connection_lost(self, exc):
        self.heard.gone.set()


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext | None, make=Listener) -> AsyncIterator[Heard]:
    heard = Heard()
    more = {"ssl_handshake_timeout": 1.0, "ssl_shutdown_timeout": 1.0} if context else {}
    server = await asyncio.get_running_loop().create_server(lambda: make(heard), HERE, 0, ssl=context, **more)
    heard.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(SECONDS):
            yield heard
    finally:
        server.close()
        await server.wait_closed()


async def say(
    port: int, context: ssl.SSLContext, fingerprint: bytes | None, name: str = tls.NO_NAME
) -> bytes:
    """What a node does: connect, check, and only then speak; returns the answer."""
    reader, writer = await asyncio.open_connection(HERE, port, ssl=context, server_hostname=name)
    try:
        if fingerprint is not None:
            tls.check_pin(writer.get_extra_info("ssl_object"), fingerprint, HERE)
        writer.write(b"hello")
        return await reader.read(100)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def join(port: int, fingerprint: bytes) -> bytes:
    """All three steps with a pinned certificate."""
    certificate = await tls.fetch_certificate(HERE, port, fingerprint)
    return await say(port, tls.client_context(certificate), fingerprint)


async def speak_plainly(port: int, data: bytes, *, half: bool = False) -> bytes:
    """Clear text into a port, and the end of it; returns what came back."""
    reader, writer = await asyncio.open_connection(HERE, port)
    writer.write(data)
    if half:
        writer.write_eof()
    else:
        await writer.drain()
        writer.close()
    back = b""
    with contextlib.suppress(OSError):
        back = await reader.read(1000) if half else b""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return back


# --- pinned ----------------------------------------------------------------------------------------


def test_the_right_pin_connects_over_tls_1_3(ours):
    async def story():
        async with serving(tls.server_context(ours)) as heard:
            assert await join(heard.port, ours.fingerprint) == b"welcome"
            assert heard.data == b"hello"
            assert heard.versions == ["TLSv1.3"] * 2

    asyncio.run(story())


def test_fetching_a_certificate_sends_nothing(ours):
    async def story():
        async with serving(tls.server_context(ours)) as heard:
            assert await tls.fetch_certificate(HERE, heard.port, ours.fingerprint) == ours.certificate
            await heard.gone.wait()
            assert heard.data == b""

    asyncio.run(story())


def test_a_wrong_pin_is_refused_before_anything_is_said(ours, theirs):
    async def story():
        async with serving(tls.server_context(ours)) as heard:
            with pytest.raises(JoinError) as caught:
                await join(heard.port, theirs.fingerprint)
            assert caught.value.code == "W5-501"
            assert ours.fingerprint.hex()[:16] in caught.value.why
            assert theirs.fingerprint.hex()[:16] in caught.value.why
            await heard.gone.wait()
            assert heard.data == b""

    asyncio.run(story())


def test_a_man_in_the_middle_with_a_certificate_of_his_own_hears_nothing(ours, theirs):
    async def story():
        async with serving(tls.server_context(theirs)) as heard:
            with pytest.raises(JoinError, match="not the one that made this ticket"):
                await join(heard.port, ours.fingerprint)
            assert heard.data == b""

    asyncio.run(story())


def test_a_man_who_steps_in_after_the_certificate_was_fetched_hears_nothing(ours, theirs):
    """He lets the first connection through to the coordinator, and takes the second himself."""

    async def story():
        async with serving(tls.server_context(ours)) as real, serving(tls.server_context(theirs)) as middle:
            certificate = await tls.fetch_certificate(HERE, real.port, ours.fingerprint)
            with pytest.raises(ssl.SSLCertVerificationError) as caught:
                await say(middle.port, tls.client_context(certificate), ours.fingerprint)
            assert middle.data == b""
            said = tls.handshake_failed(HERE, caught.value)
            assert said.code == "W5-503"
            assert "could not prove who it is" in said.what

    asyncio.run(story())


def test_a_certificate_alone_proves_nothing_without_its_key(ours, theirs, tmp_path):
    # The true certificate is public: everybody who connects gets it.
    (tmp_path / "cert.pem").write_text(ssl.DER_cert_to_PEM_cert(ours.certificate))
    with pytest.raises(UsageError) as caught:
        tls.server_context_pki(tmp_path / "cert.pem", theirs.file)
    assert "KEY_VALUES_MISMATCH" in caught.value.what


def test_a_connection_without_a_certificate_never_has_the_right_one(ours):
    with pytest.raises(JoinError) as caught:
        tls.check_pin(None, ours.fingerprint, HERE)
    assert caught.value.code == "W5-501"
    with pytest.raises(JoinError):
        tls.check_pin(None, b"", HERE)
    unshaken = tls.client_context(ours.certificate).wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO())
    with pytest.raises((JoinError, ValueError)):
        tls.check_pin(unshaken, ours.fingerprint, HERE)


def test_an_empty_pin_fits_nobody(ours):
    async def story():
        async with serving(tls.server_context(ours)) as heard:
            with pytest.raises(JoinError):
                await tls.fetch_certificate(HERE, heard.port, b"")

    asyncio.run(story())


def test_pins_work_without_sockets_too(ours):
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = tls.server_context(ours).wrap_bio(to_server, to_client, server_side=True)
    client = tls.client_context(ours.certificate).wrap_bio(to_client, to_server)
    left = {client, server}
    for _ in range(10):
        for end in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                left.discard(end)
    assert not left
    assert tls.check_pin(client, ours.fingerprint, "memory") == ours.certificate
    client.write(b"hello")
    assert server.read() == b"hello"
    assert client.compression() is None
    # No session can be resumed.
    server.write(b"welcome")
    assert client.read() == b"welcome"
    assert client.session is None or not client.session.has_ticket


# --- what is not TLS 1.3 ----------------------------------------------------------------------------


def test_an_older_client_is_refused(ours):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    async def story():
        async with serving(tls.server_context(ours)) as heard:
            with pytest.raises(tls.HANDSHAKE_ERRORS):
                await say(heard.port, old, None)
            assert heard.made == 0

    asyncio.run(story())


def test_an_older_server_is_refused(ours):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.load_cert_chain(ours.file)
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    async def story():
        async with serving(old) as heard:
            with pytest.raises(JoinError, match=r"no TLS 1\.3 connection") as caught:
                await join(heard.port, ours.fingerprint)
            assert caught.value.code == "W5-503"
            assert heard.data == b""

    asyncio.run(story())


@pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
@pytest.mark.parametrize("data", [b"", b"\x00", b"hello", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01" * 400])
def test_clear_text_into_tls_is_never_heard_however_it_ends(ours, data, half):
    async def story():
        async with serving(tls.server_context(ours)) as heard:
            back = await speak_plainly(heard.port, data, half=half)
            assert b"welcome" not in back
            # It went on meanwhile, and still serves others.
            assert await join(heard.port, ours.fingerprint) == b"welcome"
            assert heard.data == b"hello"
            assert heard.made == 2

    asyncio.run(story())


def test_a_coordinator_in_clear_text_is_not_spoken_to(ours):
    class Talker(Listener):
        def connection_made(self, transport):
            super().connection_made(transport)
            transport.write(b"w5 welcome to a run in clear text\n")

    async def story():
        async with serving(None, Talker) as heard:
            with pytest.raises(JoinError, match=r"no TLS 1\.3 connection"):
                await join(heard.port, ours.fingerprint)
            await heard.gone.wait()
            assert b"hello" not in heard.data

    asyncio.run(story())


def test_who_says_nothing_is_given_up(ours, monkeypatch):
    monkeypatch.setattr(tls, "HANDSHAKE_SECONDS", 0.1)

    async def story():
        async with serving(None, lambda heard: asyncio.Protocol()) as heard:
            with pytest.raises(JoinError, match="SSL handshake is taking longer") as caught:
                await tls.fetch_certificate(HERE, heard.port, ours.fingerprint)
            assert caught.value.code == "W5-503"

    asyncio.run(story())


def test_nobody_there_is_for_the_caller_to_say():
    async def story():
        with socket.socket() as sock:
            sock.bind((HERE, 0))
            with pytest.raises(ConnectionRefusedError):
                await tls.fetch_certificate(HERE, sock.getsockname()[1], bytes(32))

    asyncio.run(story())


# --- certificates of the user's own -------------------------------------------------------------------


@dataclass
class Authority:
    """Signs certificates in a folder."""

    folder: Path

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.folder.name)])
        self.folder.mkdir()
        self.file = self.folder / "ca.pem"
        self._write(self.file, self._sign(self.name, self.key, x509.BasicConstraints(True, None), 9))

    def issue(self, name: str, days: int = 9) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        extension = x509.SubjectAlternativeName([x509.DNSName(name)])
        cert, key_file = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        self._write(cert, self._sign(subject, key, extension, days))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert, key_file

    def _sign(self, subject, key, extension, days) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=30))
            .not_valid_after(now + dt.timedelta(days=days))
            .add_extension(extension, critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @staticmethod
    def _write(file: Path, certificate: x509.Certificate) -> None:
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def test_a_certificate_of_an_authority_is_checked_with_its_name_and_dates(authority, tmp_path):
    good = tls.server_context_pki(*authority.issue("trainer.example.org"))
    old = tls.server_context_pki(*authority.issue("old.example.org", days=-1))
    stranger = Authority(tmp_path / "stranger")

    async def story():
        client = tls.client_context_pki(authority.file)
        async with serving(good) as heard, serving(old) as past:
            assert await say(heard.port, client, None, "trainer.example.org") == b"welcome"
            for port, context, name, words in [
                (heard.port, client, "other.example.org", "Hostname mismatch"),
                (past.port, client, "old.example.org", "expired"),
                (heard.port, tls.client_context_pki(stranger.file), "trainer.example.org", "unable to get"),
                (heard.port, tls.client_context_pki(), "trainer.example.org", "unable to get"),
            ]:
                with pytest.raises(ssl.SSLCertVerificationError, match=words):
                    await say(port, context, None, name)
            assert heard.data == b"hello"
            assert past.data == b""

    asyncio.run(story())


def test_where_nodes_need_certificates_nobody_else_is_heard(authority, tmp_path):
    name = "trainer.example.org"
    server = tls.server_context_pki(*authority.issue(name), authority.file)
    stranger = Authority(tmp_path / "stranger")
    cert, key = authority.issue("node")

    async def story():
        async with serving(server) as heard:
            for own in ((None, None), stranger.issue("node")):
                # In TLS 1.3 a client has shaken hands before the server has; it is told by the end.
                answer = b""
                with contextlib.suppress(*tls.HANDSHAKE_ERRORS):
                    answer = await say(heard.port, tls.client_context_pki(authority.file, *own), None, name)
                assert (answer, heard.made) == (b"", 0)
            # What comes in clear before the handshake must not count as a node's (CVE-2023-40217).
            for half in (True, False):
                await speak_plainly(heard.port, b"hello from nobody", half=half)
            assert (heard.made, heard.data) == (0, b"")
            context = tls.client_context_pki(authority.file, cert, key)
            assert await say(heard.port, context, None, name) == b"welcome"
            assert heard.data == b"hello"

    asyncio.run(story())


def test_files_that_cannot_be_used_are_told_at_once(authority, tmp_path):
    cert, key = authority.issue("a")
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for make, words in [
        (lambda: tls.server_context_pki(tmp_path / "none", key), "No such file"),
        (lambda: tls.server_context_pki(nonsense, key), "cannot be used"),
        (lambda: tls.server_context_pki(cert, locked), "has a password"),
        (lambda: tls.server_context_pki(cert, key, tmp_path / "none"), "No such file"),
        (lambda: tls.client_context_pki(nonsense), "cannot be used"),
        (lambda: tls.client_context_pki(authority.file, cert, authority.issue("b")[1]), "MISMATCH"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            make()
        assert caught.value.code == "W5-505"


# --- how contexts are made ------------------------------------------------------------------------------


def test_every_context_is_tls_1_3_alone(ours, authority):
    cert, key = authority.issue("a")
    servers = [
        tls.server_context(ours),
        tls.server_context_pki(cert, key),
        tls.server_context_pki(cert, key, authority.file),
    ]
    clients = [tls.client_context(ours.certificate), tls.client_context_pki(authority.file)]
    for context in (*servers, *clients):
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
        assert context.options & ssl.OP_NO_COMPRESSION
        assert context.keylog_filename is None
    assert [context.num_tickets for context in servers] == [0, 0, 0]
    assert [context.verify_mode for context in servers] == [ssl.CERT_NONE, ssl.CERT_NONE, ssl.CERT_REQUIRED]
    assert [context.verify_mode for context in clients] == [ssl.CERT_REQUIRED] * 2
    assert [context.check_hostname for context in clients] == [False, True]


def test_a_python_with_a_hole_in_its_tls_is_refused():
    tls.check_python()
    for good in ((3, 11, 5), (3, 12, 0), (4, 0, 0)):
        tls.check_python(good)
    for bad in ((3, 11, 4), (3, 10, 99)):
        with pytest.raises(UsageError, match="CVE-2023-40217") as caught:
            tls.check_python(bad)
        assert caught.value.code == "W5-504"


def test_contexts_are_made_in_one_place_and_no_check_is_an_assert():
    package = Path(w5xde.__file__).parent
    makers = set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in {
                "SSLContext", "create_default_context", "_create_unverified_context", "wrap_socket",
            }:  # fmt: skip
                makers.add(path.name)
            if path.name in {
                "tls.py",
                "register.py",
                "private_files.py",
                "identity.py",
                "credentials.py",
                "ticket.py",
            }:
                assert not isinstance(node, ast.Assert), path
    assert makers == {"tls.py"}
