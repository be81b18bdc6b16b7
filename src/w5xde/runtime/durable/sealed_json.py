"""Sealed JSON: a line that holds the sha256 of its own content and of the line before it.

    {"sha256":"…64 digits…","sealed":{…}}

The hash is over the bytes as written, so that even a changed blank is found. Knows no files.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

T = TypeVar("T")

_HEAD, _MIDDLE, _TAIL = b'{"sha256":"', b'","sealed":', b"}"
_HASH_AT = len(_HEAD)
_CONTENT_AT = _HASH_AT + 64 + len(_MIDDLE)

# The hash before the first line of a chain.
NOTHING = "0" * 64


class Damaged(Exception):
    """Bytes that differ from the bytes that were written."""


def seal(content: bytes, before: str = NOTHING) -> tuple[bytes, str]:
    """Return the line for a content that follows the line with the hash `before`, and its own hash."""
    digest = hashlib.sha256(before.encode() + content).hexdigest()
    return _HEAD + digest.encode() + _MIDDLE + content + _TAIL, digest


def unseal(line: bytes, before: str = NOTHING) -> tuple[bytes, str]:
    """Return a line's content and hash; raise Damaged if `seal` would write another line."""
    content = line[_CONTENT_AT : -len(_TAIL)]
    again, digest = seal(content, before)
    if again != line:
        raise Damaged("its hash does not match")
    return content, digest


def parse(content: bytes, kind: type[T]) -> T:
    """Decode a content. A right hash proves that it is as it was written, not that it makes sense."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"it makes no sense: {error}") from error


def content_of(line: bytes) -> bytes:
    """Return the content of a line without checking its hash."""
    return line[_CONTENT_AT : -len(_TAIL)]
