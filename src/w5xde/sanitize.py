"""Makes untrusted text harmless before it is shown, and untrusted numbers before they are added up.

A text from the wire, from a file or from a user's exception may hold characters that a terminal obeys: escape
sequences that move the cursor, set the title or hide lines, or marks that turn the direction of writing. All
text that is shown or logged passes through here. Knows nothing of its origin or destination.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Whole escape sequences, or their printable rests would stay: CSI (colours, cursor), OSC and its kind
# (titles, links, clipboard) up to their end, and the short ones.
_SEQUENCES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[P\\]X^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c|$)"
    "|\x1b[ -/]*[0-~]?"
)
_SPACES = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
# Control characters, marks that turn the direction of writing, and lone surrogates, which UTF-8 cannot
# encode.
_OBEYED = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(f"[{_OBEYED}]")
_SUSPECT = re.compile(f"[{_OBEYED}\u2028\u2029]")


def harmless(text: str) -> str:
    """The text in one line, without anything that a terminal obeys."""
    # Nearly all texts are harmless, and some are checked for every message.
    if _SUSPECT.search(text) is None:
        return text
    return _UNSAFE.sub("", _SPACES.sub(" ", _SEQUENCES.sub("", text)))


def visible(text: str) -> str:
    """A line with everything written out that a terminal obeys or does not show, such as `<U+202E>`.

    For text in which nothing may be hidden or left out. Tabs become blanks.
    """
    tabless = text.expandtabs(4)
    if tabless.isprintable():
        return tabless
    return "".join(each if each.isprintable() else f"<U+{ord(each):04X}>" for each in tabless)


def sane_seconds(seconds: float) -> float:
    """A duration that a node reports, or 0 if it is negative, absurdly long or NaN."""
    return seconds if 0.0 <= seconds < 1e9 else 0.0


def to_json(value: Any) -> str:
    """JSON that every reader accepts and no terminal obeys; NaN and infinities become null."""
    text = msgspec.json.encode(value).decode()
    # A reader decodes the escape to the same value.
    return _SUSPECT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
