"""TLS 1.3: the one place that makes SSL contexts and checks certificates.

A node knows its coordinator by the fingerprint in its ticket, not by an authority:

    1  fetch_certificate   connects without trust, takes the certificate, compares it with the fingerprint,
                           and closes; no application byte is sent on this connection
    2  client_context      trusts that certificate alone: a server without its key fails the handshake
    3  check_pin           compares the fingerprint once more, on the connection that will be used

So application bytes exist only on connections that require the certificate. Its dates never matter, because
the ticket's expiry counts. With a certificate of the user's own the ordinary rules hold, name and dates
included. Knows no tickets, runs or nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import sys
from pathlib import Path
from typing import NoReturn, TypedDict

from w5xde.errors import JoinError, UsageError
from w5xde.runtime.net.sockets import reason_of
from w5xde.ticket import other_identity

# asyncio would wait 60 and 30 seconds, and a peer that has not authenticated must not take that long.
HANDSHAKE_SECONDS = 5.0
SHUTDOWN_SECONDS = 2.0


class Timeouts(TypedDict):
    """Keyword arguments of asyncio for a connection with TLS."""

    ssl_handshake_timeout: float
    ssl_shutdown_timeout: float


TIMEOUTS = Timeouts(ssl_handshake_timeout=HANDSHAKE_SECONDS, ssl_shutdown_timeout=SHUTDOWN_SECONDS)
# For `server_hostname` of pinned connections: the pin identifies the server, and a name would be readable.
NO_NAME = ""
# What dialling raises once a server has answered: it refuses, closes, or is silent until asyncio gives up.
HANDSHAKE_ERRORS = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)
# Older ones may treat bytes from before the handshake as if they came after it (CVE-2023-40217).
PYTHON_MIN = (3, 11, 5)

# For annotations in modules that must not import ssl.
Context = ssl.SSLContext


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> None:
    """Refuse a Python whose TLS can be bypassed."""
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


def server_context(cert: Path, key: Path | None = None, ca: Path | None = None) -> ssl.SSLContext:
    """For a coordinator with this certificate; `cert` may hold the key too.

    With `ca`, only nodes with a certificate of that authority are accepted.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    # No session resumption: every connection does a full handshake, and no session key can leak.
    context.num_tickets = 0
    _load_own(context, cert, key)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, ca)
    return context


# --- the node's side ------------------------------------------------------------------------------


def client_context(certificate: bytes, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For connections to the server that has the key of this certificate (DER), and to no other.

    `cert` and `key` are the node's own, for a coordinator that requires one.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # Its issuer does not matter.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    if cert is not None:
        _load_own(context, cert, key)
    return context


def client_context_pki(
    ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """For connections to servers with a certificate of this authority, or of one that the system trusts.

    `cert` and `key` are the node's own, for a coordinator that requires one.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_authority(context, ca)
    if cert is not None:
        _load_own(context, cert, key)
    return context


def inspection_context() -> ssl.SSLContext:
    """To fetch a certificate: trusts any server, so nothing may be sent, and the pin must be checked."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def shake_hands(sock: socket.socket, context: ssl.SSLContext, name: str, address: str) -> ssl.SSLSocket:
    """Begin TLS on a blocking socket; if that fails, close it and raise JoinError."""
    try:
        return context.wrap_socket(sock, server_hostname=name or None)
    except HANDSHAKE_ERRORS as error:
        sock.close()
        raise handshake_failed(address, error) from error
    except BaseException:
        sock.close()
        raise


def version_of(sock: socket.socket) -> str | None:
    """The TLS version of a connection; None if it is in clear text."""
    return sock.version() if isinstance(sock, ssl.SSLSocket) else None


async def fetch_certificate(host: str, port: int, fingerprint: bytes) -> bytes:
    """Fetch the certificate (DER) of a server; JoinError if it does not have this fingerprint.

    OSError and TimeoutError, if no server answers, are left to the caller.
    """
    address = f"{host}:{port}"
    try:
        _, writer = await asyncio.open_connection(
            host,
            port,
            ssl=inspection_context(),
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
    """Return the server's certificate (DER) if it has this fingerprint; otherwise raise JoinError W5-501.

    Callers must check before they send anything. A connection without TLS never passes.
    """
    certificate = (connection.getpeercert(binary_form=True) if connection is not None else None) or b""
    got = hashlib.sha256(certificate).digest()
    if not certificate or not hmac.compare_digest(got, fingerprint):
        raise other_identity(address, got if certificate else b"", fingerprint)
    return certificate


def handshake_failed(address: str, error: OSError) -> JoinError:
    """Describe one of `HANDSHAKE_ERRORS`: a server answered, and the handshake failed."""
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
        # OpenSSL would ask on the terminal, and a coordinator in the background would wait without end.
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
    """The sha256 of the first certificate in a PEM file: those after it are its issuers'."""
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
