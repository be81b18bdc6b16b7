"""TLS 1.3 and nothing else: the one place that makes SSL contexts, and says whom a connection is with.

A node knows its coordinator by the ticket's fingerprint, not by an authority:

    1  fetch_certificate   a connection that trusts nobody, takes the certificate, compares it with the pin,
                           and closes; not one byte of ours is sent over it
    2  client_context      from that certificate: whoever cannot prove to have its key fails the handshake
    3  check_pin           the hash once more, on the very connection that is going to be used

So what we have to say exists only on connections that require the certificate. Its dates are made never to
matter: certificates that expire in the night are a classic failure, and the ticket's expiry is what counts.
With a certificate of the user's own the ordinary rules hold, name and dates included.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from w5xde.errors import JoinError, UsageError
from w5xde.ticket import other_identity

if TYPE_CHECKING:
    # Only who makes certificates needs what makes them; a node does not.
    from w5xde.runtime.admission.identity import RunIdentity

# asyncio would wait 60 and 30 seconds; strangers must not keep us that long.
HANDSHAKE_SECONDS = 5.0
SHUTDOWN_SECONDS = 2.0
# For `server_hostname` of pinned connections: none is sent, as the pin is the name and names tell others.
NO_NAME = ""
# What dialling raises once somebody answered: they say no, or close, or say nothing until asyncio gives up.
HANDSHAKE_ERRORS = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)
# Before it, what was sent in clear before the handshake could be read as if it came after (CVE-2023-40217).
PYTHON_MIN = (3, 11, 5)


# For others to name what only this module makes.
Context = ssl.SSLContext


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> None:
    """Refuse a Python whose TLS can be talked past."""
    if version < PYTHON_MIN:
        raise UsageError(
            f"Python {'.'.join(map(str, version))} has a known hole in its TLS (CVE-2023-40217)",
            code="W5-504",
            fix=f"install Python {'.'.join(map(str, PYTHON_MIN))} or newer",
        )


def _context(protocol: int) -> ssl.SSLContext:
    check_python()
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION
    return context


# --- the coordinator's side -----------------------------------------------------------------------


def server_context(identity: RunIdentity) -> ssl.SSLContext:
    """For nodes that pin our certificate."""
    return _server_context(identity.file, None)


def server_context_pki(cert: Path, key: Path, ca: Path | None = None) -> ssl.SSLContext:
    """With the user's own certificate; with `ca`, only nodes with a certificate of that authority come in."""
    context = _server_context(cert, key)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, ca)
    return context


def _server_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # No resumption: every connection proves everything anew, and no ticket key can leak.
    context.num_tickets = 0
    _load_own(context, cert, key)
    return context


# --- the node's side ------------------------------------------------------------------------------


def client_context(certificate: bytes, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """Connections to whoever has the key of this certificate (DER), and to nobody else.

    `cert` and `key` are the node's own, where the coordinator wants to see one.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Whoever signed it does not matter: it is this one.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    if cert is not None:
        _load_own(context, cert, key)
    return context


def client_context_pki(
    ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Connections to who has a certificate for the host's name, of this authority or one the system trusts.

    `cert` and `key` are the node's own, where the coordinator wants to see one.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_authority(context, ca)
    if cert is not None:
        _load_own(context, cert, key)
    return context


def context_to_look() -> ssl.SSLContext:
    """Only to look: nothing is sent over it, and what was seen is worth nothing until it fits the pin."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shake_hands(sock: socket.socket, context: ssl.SSLContext, name: str, address: str) -> ssl.SSLSocket:
    """TLS on a connection that blocks, or JoinError; the socket is closed if it did not come about."""
    try:
        return context.wrap_socket(sock, server_hostname=name or None)
    except HANDSHAKE_ERRORS as error:
        sock.close()
        raise handshake_failed(address, error) from error
    except BaseException:
        sock.close()
        raise


def version_of(sock: socket.socket) -> str | None:
    """The version of TLS that is spoken on it; None: it is in clear text."""
    return sock.version() if isinstance(sock, ssl.SSLSocket) else None


async def fetch_certificate(host: str, port: int, fingerprint: bytes) -> bytes:
    """The DER of the certificate with this fingerprint, from who answers there. JoinError: it is another.

    OSError and TimeoutError, if nobody answers, are the caller's: dialling has words for them.
    """
    address = f"{host}:{port}"
    try:
        _, writer = await asyncio.open_connection(
            host,
            port,
            ssl=context_to_look(),
            server_hostname=NO_NAME,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
        )
    except HANDSHAKE_ERRORS as error:
        raise handshake_failed(address, error) from error
    try:
        return check_pin(writer.get_extra_info("ssl_object"), fingerprint, address)
    finally:
        writer.transport.abort()


def check_pin(connection: ssl.SSLObject | ssl.SSLSocket | None, fingerprint: bytes, address: str) -> bytes:
    """The certificate (DER) at the other end, if it has this fingerprint; JoinError W5-501 otherwise.

    To be asked before anything is sent. Without TLS there is no certificate, and so never the right one.
    """
    certificate = (connection.getpeercert(binary_form=True) if connection is not None else None) or b""
    got = hashlib.sha256(certificate).digest()
    if not certificate or not hmac.compare_digest(got, fingerprint):
        raise other_identity(address, got if certificate else b"", fingerprint)
    return certificate


def handshake_failed(address: str, error: OSError) -> JoinError:
    """Somebody answered, and no connection came about: one of `HANDSHAKE_ERRORS`, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return JoinError(
            f"the machine at {address} could not prove who it is: {error.verify_message}",
            code="W5-503",
            why="its certificate is not the expected one, or someone sits in between",
            fix="get a new ticket from who runs the coordinator; for a certificate of your own see --tls-ca",
        )
    return JoinError(
        f"no TLS 1.3 connection with {address} came about ({reason_of(error)})",
        code="W5-503",
        why="another program listens there, the run is in clear text, or it lets nobody else in for now",
        fix="check the address and the coordinator's log; a run started anew needs a new ticket",
    )


# --- files of the user's own ----------------------------------------------------------------------


def _load_own(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    def ask() -> NoReturn:
        # OpenSSL would ask on the terminal, and a coordinator in the background would wait for ever.
        raise UsageError(
            f"the key {key or cert} has a password",
            code="W5-505",
            fix="remove it with  openssl pkey  and keep the file readable for its owner alone",
        )

    try:
        context.load_cert_chain(cert, key, password=ask)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the certificate {cert} and its key cannot be used: {reason_of(error)}",
            code="W5-505",
            fix="name PEM files that belong together with --tls-cert and --tls-key",
        ) from error


def fingerprint_of(cert: Path) -> bytes:
    """The sha256 of the user's own certificate, which stands before those of who signed it."""
    text = cert.read_text(encoding="ascii", errors="replace")
    start, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[start : end + len(ssl.PEM_FOOTER)])).digest()


def _load_authority(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the authority {ca} cannot be used: {reason_of(error)}",
            code="W5-505",
            fix="name a PEM file with its certificate with --tls-ca",
        ) from error


def reason_of(error: OSError | ValueError) -> str:
    """What went wrong, without what was tried."""
    if isinstance(error, ssl.SSLError):
        return error.reason or "not as TLS wants it"
    if isinstance(error, ConnectionResetError):
        return "it closed the connection"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
