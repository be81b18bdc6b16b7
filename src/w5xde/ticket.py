"""A ticket: the line with which a machine joins a run, as an object and as text. Knows no sockets or clock.

    w5 + base32 of    version and kind 1   length 1   id 8   secret 16   expiry 4   fingerprint 32 or none
                      port 2   hosts: 0 + IPv4, 1 + IPv6, or length + 1 and a name   CRC-32 4

The text has only letters and digits, so that a double click selects all of it and a QR code is small; case,
blanks and line breaks do not matter. It contains its length, so a cut is always noticed; a wrong character,
or two in the wrong order, is a burst of at most ten bits, and CRC-32 notices every burst of up to 32. The
fingerprint is the sha256 of the coordinator's certificate, so no authority is needed to trust it. A ticket is
a secret: neither `repr`, nor `str`, nor any error shows it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import shlex
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from w5xde.errors import JoinError, UsageError

PREFIX = "w5"
VERSION = 1
ID_BYTES = 8
SECRET_BYTES = 16
FINGERPRINT_BYTES = 32
# A coordinator has few addresses worth trying; each costs a node that cannot reach it seconds.
ADDRESSES_MAX = 4
VARIABLE = "W5XDE_TICKET"
# The length is one byte; in characters that is 410, and line breaks and blanks may be as many again.
_BYTES_MAX = 255
TEXT_CHARACTERS_MAX = 4096
# Fewer than any ticket has, and more than the name of a module.
_CHARACTERS_MIN = 40
_EXPIRES_MAX = 2**32 - 1
# Enough of a fingerprint for people to compare: finding another certificate with the same 64 bits takes too
# long.
_SHOWN_HEX = 16

_PINNED, _CLEAR, _PKI = 0, 1, 2
_HEAD = struct.Struct(f">BB{ID_BYTES}s{SECRET_BYTES}sI")
_CRC_BYTES = 4
_IPV4, _IPV6, _NAME = 0, 1, 1

# Crockford's base32, without I, L, O and U; the first three are read as the digits that they look like.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_BASE_32 = "0123456789abcdefghijklmnopqrstuv"
_TO_BASE_32 = str.maketrans(_ALPHABET + "oil", _BASE_32 + "011")
_FROM_BASE_32 = str.maketrans(_BASE_32, _ALPHABET)
_READABLE = frozenset(_ALPHABET + "oil")
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?")
_HOST_NAME_MAX = 253


class Secret:
    """Bytes that are shown by `reveal` alone, never by printing or storing their owner."""

    __slots__ = ("_hidden",)

    def __init__(self, value: bytes) -> None:
        self._hidden = bytes(value)

    def reveal(self) -> bytes:
        return self._hidden

    def digest(self) -> bytes:
        """Return the sha256, which may be stored."""
        return hashlib.sha256(self._hidden).digest()

    def __len__(self) -> int:
        return len(self._hidden)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self.digest(), other.digest())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "***"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not copied into anything that could be stored or sent")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a machine needs to join: addresses, the certificate to trust, and a secret."""

    # (host, port), best first; all have one port. Hosts are IPv4, IPv6 or a name.
    addresses: tuple[tuple[str, int], ...]
    # The sha256 of the certificate in DER; empty if the run is in clear text or an authority signed it.
    fingerprint: bytes
    id: bytes
    secret: Secret
    # Unix seconds; 0: never.
    expires_at: int = 0
    # Nothing is encrypted: every machine on the network path can read and change everything.
    is_clear: bool = False
    # An authority signed the certificate: names and dates are checked, nothing is pinned.
    is_pki: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "addresses", tuple((_canonical(host), port) for host, port in self.addresses)
        )
        if not 1 <= len(self.addresses) <= ADDRESSES_MAX:
            _cannot_be(f"it has {len(self.addresses)} addresses; 1 to {ADDRESSES_MAX} fit")
        if len({port for _, port in self.addresses}) > 1 or not 1 <= self.addresses[0][1] <= 65535:
            _cannot_be("its addresses need one port from 1 to 65535")
        if len(self.id) != ID_BYTES or len(self.secret) != SECRET_BYTES:
            _cannot_be("its id or its secret has not the right length")
        if not 0 <= self.expires_at <= _EXPIRES_MAX:
            _cannot_be("it expires later than a ticket can say", fix="choose a shorter lifetime, or none")
        if self.is_clear and self.is_pki:
            _cannot_be("a run in clear text has no certificate to check")
        if len(self.fingerprint) != (0 if self.is_clear or self.is_pki else FINGERPRINT_BYTES):
            _cannot_be("its fingerprint has not the right length")
        if len(self._body()) + _CRC_BYTES > _BYTES_MAX:
            _cannot_be("its host names are too long")

    def expired(self, now: float) -> bool:
        return bool(self.expires_at) and now >= self.expires_at

    def to_text(self) -> str:
        """Return the line to hand on. It holds the secret."""
        body = self._body()
        data = body + zlib.crc32(body).to_bytes(_CRC_BYTES, "big")
        return PREFIX + _to_base32(data)

    def _body(self) -> bytes:
        """Return all bytes but the checksum."""
        kind = _CLEAR if self.is_clear else _PKI if self.is_pki else _PINNED
        rest = self.fingerprint + self.addresses[0][1].to_bytes(2, "big")
        rest += b"".join(_pack_host(host) for host, _ in self.addresses)
        # `__post_init__` refuses a ticket that is too long; until then the length only has to fit its byte.
        length = min(_HEAD.size + len(rest) + _CRC_BYTES, _BYTES_MAX)
        head = _HEAD.pack(VERSION << 4 | kind, length, self.id, self.secret.reveal(), self.expires_at)
        return head + rest


def join_line(ticket: str, job: str = "") -> str:
    """Return the command for another machine: with the text of a ticket, which holds the secret, or @FILE.

    Without a job, its code comes with it.
    """
    return " ".join(["w5xde join", shlex.quote(ticket), *([shlex.quote(job)] if job else [])])


def _cannot_be(why: str, fix: str = "name other addresses for nodes to come to") -> NoReturn:
    raise UsageError(f"this cannot be a ticket: {why}", code="W5-115", fix=fix)


def _canonical(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.lower()
        if len(name) > _HOST_NAME_MAX or not _HOST_NAME.fullmatch(name):
            _cannot_be("one of its hosts is neither an IP address nor a host name")
        return name
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        _cannot_be("an address with a zone means something on its own machine alone")
    return str(address)


def _pack_host(host: str) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return bytes([_NAME + len(host)]) + host.encode("ascii")
    return bytes([_IPV4 if address.version == 4 else _IPV6]) + address.packed


def _unpack_hosts(data: bytes) -> list[str]:
    hosts, at = [], 0
    while at < len(data):
        mark = data[at]
        length = {_IPV4: 4, _IPV6: 16}.get(mark, mark - _NAME)
        piece = data[at + 1 : at + 1 + length]
        if len(piece) != length:
            raise ValueError("an address is cut short")
        hosts.append(str(ipaddress.ip_address(piece)) if mark in (_IPV4, _IPV6) else piece.decode("ascii"))
        at += 1 + length
    return hosts


# --- text -----------------------------------------------------------------------------------------


def _to_base32(data: bytes) -> str:
    characters = _characters(len(data))
    value = int.from_bytes(data, "big") << (characters * 5 - len(data) * 8)
    digits = [_BASE_32[value >> (5 * at) & 31] for at in reversed(range(characters))]
    return "".join(digits).translate(_FROM_BASE_32)


def _from_base32(digits: str, length: int) -> tuple[bytes, int]:
    """Return this many bytes, and the unused bits of the last character."""
    value = int(digits.translate(_TO_BASE_32), 32)
    over = len(digits) * 5 - length * 8
    return (value >> over).to_bytes(length, "big"), value & ((1 << over) - 1)


def _characters(length: int) -> int:
    return -(-length * 8 // 5)


def parse(text: str) -> Ticket:
    """Return the ticket of a text. Raises JoinError W5-101."""
    packed = "".join(text[:TEXT_CHARACTERS_MAX].split())
    count = len(packed)
    # Before lowering: some letters beyond ASCII become ASCII letters.
    if not packed.isascii():
        raise _damaged(f"this ticket is damaged ({count} characters, one of them is in no ticket)")
    packed = packed.lower()
    if not packed:
        raise _damaged("this ticket is empty")
    if not packed.startswith(PREFIX):
        raise _damaged(f"this is not a ticket ({count} characters, does not begin with {PREFIX})")
    if not _READABLE.issuperset(packed):
        raise _damaged(f"this ticket is damaged ({count} characters, one of them is in no ticket)")
    digits = packed.removeprefix(PREFIX)
    # The length is the second byte, which ends within the fourth character.
    length = int(digits[:4].translate(_TO_BASE_32), 32) >> 4 & 255 if len(digits) >= 4 else 0
    if length <= _HEAD.size + _CRC_BYTES:
        raise _damaged(f"this ticket is damaged ({count} characters, checksum wrong)")
    if len(digits) != _characters(length):
        expected = len(PREFIX) + _characters(length)
        raise _damaged(f"this ticket is damaged ({count} characters, {expected} expected)")
    data, spare = _from_base32(digits, length)
    body, crc = data[:-_CRC_BYTES], data[-_CRC_BYTES:]
    if zlib.crc32(body).to_bytes(_CRC_BYTES, "big") != crc or spare:
        raise _damaged(f"this ticket is damaged ({count} characters, checksum wrong)")
    return _unpack(body)


def _unpack(body: bytes) -> Ticket:
    """Return the ticket of bytes with a right checksum, which may still hold nonsense."""
    mark, _, ticket_id, secret, expires_at = _HEAD.unpack_from(body)
    version, kind = mark >> 4, mark & 15
    if version != VERSION or kind not in (_PINNED, _CLEAR, _PKI):
        raise JoinError(
            f"this ticket has format {version}.{kind}, which this w5xde does not know",
            code="W5-101",
            fix="install the coordinator's version of w5xde here",
        )
    port_at = _HEAD.size + (FINGERPRINT_BYTES if kind == _PINNED else 0)
    port = int.from_bytes(body[port_at : port_at + 2], "big")
    try:
        return Ticket(
            addresses=tuple((host, port) for host in _unpack_hosts(body[port_at + 2 :])),
            fingerprint=body[_HEAD.size : port_at],
            id=ticket_id,
            secret=Secret(secret),
            expires_at=expires_at,
            is_clear=kind == _CLEAR,
            is_pki=kind == _PKI,
        )
    except (ValueError, UsageError):
        # The checksum is right, so this is no accident: it was made so.
        raise _damaged("this ticket makes no sense, though it is whole") from None


def _damaged(what: str) -> JoinError:
    return JoinError(
        what, code="W5-101", fix="copy the whole line, or make a new one there with  w5xde ticket new RUN"
    )


def is_meant_as_job(word: str, environ: Mapping[str, str]) -> bool:
    """Whether the only word after `w5xde join` names a job, because the ticket is in the environment."""
    text = "".join(word.split()).lower()
    if text == "-" or text.startswith("@") or (text.startswith(PREFIX) and text.isalnum()):
        return False
    return ".py" in text or bool(environ.get(VARIABLE, "").strip())


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 host may be in brackets."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{address!r} is not an address",
            code="W5-111",
            fix="give host and port, for example 192.168.1.20:5555",
        )
    return host, int(port)


# --- errors of a ticket that was read -------------------------------------------------------------


def no_longer_accepted(reason: str) -> JoinError:
    """Return the error for a ticket that was valid once."""
    return JoinError(
        f"the coordinator no longer accepts this ticket ({reason})",
        code="W5-105",
        fix="there, run  w5xde ticket new RUN --lifetime 24h",
    )


def expired_ago(expires_at: float, now: float) -> str:
    """Return how long ago a ticket expired, in words."""
    seconds = max(0.0, now - expires_at)
    for length, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= length:
            count = int(seconds // length)
            return f"expired {count} {'day' if unit == 'days' and count == 1 else unit} ago"
    return f"expired {seconds:.0f} s ago"


def other_identity(address: str, got: bytes, expected: bytes) -> JoinError:
    """Return the error for an address at which another machine answers; nothing was sent to it."""
    return JoinError(
        f"the machine at {address} is not the one that made this ticket",
        code="W5-501",
        why=f"its fingerprint is {shown(got)}, expected {shown(expected)}: the run was started anew without "
        "--resume, or someone sits in between",
        fix="compare with  w5xde ticket list RUN  there, then use a new ticket",
    )


def shown(fingerprint: bytes) -> str:
    """Return the part of a fingerprint that people compare."""
    return f"{fingerprint.hex()[:_SHOWN_HEX]}…" if fingerprint else "none"
