"""Sealed JSON: one line that carries the sha256 of its own content, and of what came before it.

    {"sha256":"…64 digits…","sealed":{…}}

The hash is over the bytes as they stand, so that not even a blank can change unnoticed.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

T = TypeVar("T")

_HEAD, _MIDDLE, _TAIL = b'{"sha256":"', b'","sealed":', b"}"
_HASH_AT = len(_HEAD)
_CONTENT_AT = _HASH_AT + 64 + len(_MIDDLE)

# What a chain begins with.
NOTHING = "0" * 64


class Damaged(Exception):
    """These are not the bytes that were written."""


def seal(content: bytes, before: str = NOTHING) -> tuple[bytes, str]:
    """The line for a content that follows the line with the hash `before`, and its own hash."""
    digest = hashlib.sha256(before.encode() + content).hexdigest()
    return _HEAD + digest.encode() + _MIDDLE + content + _TAIL, digest


def unseal(line: bytes, before: str = NOTHING) -> tuple[bytes, str]:
    """The content of a line, and its hash; whatever is not exactly what `seal` gave is damaged."""
    content = line[_CONTENT_AT : -len(_TAIL)]
    again, digest = seal(content, before)
    if again != line:
        raise Damaged("its hash does not match")
    return content, digest


def parse(content: bytes, kind: type[T]) -> T:
    """What a content says. A right hash proves that it is as it was written, not that it makes sense."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"it makes no sense: {error}") from error


def content_of(line: bytes) -> bytes:
    """The content of a line whose predecessor is not known yet; nothing is checked."""
    return line[_CONTENT_AT : -len(_TAIL)]
