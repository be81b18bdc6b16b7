"""Others' words, made harmless before anybody sees them.

A text that came over the wire, from a file or from a user's exception may hold what a terminal obeys: escape
sequences that move the cursor, set the title or hide lines, or marks that turn the direction of writing.
Whatever is shown or kept goes through here. Knows nothing of where words come from or go to.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

# Escape sequences as a whole, or their harmless-looking rests would stay: CSI (colours, cursor), OSC and its
# kind (titles, links, clipboard) up to their end, and the short ones.
_SEQUENCES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"
    "|(?:\x1b[P\\]X^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c|$)"
    "|\x1b[ -/]*[0-~]?"
)
_SPACES = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
# Control characters, marks that turn the direction of writing, and halves of characters, not to be encoded.
_OBEYED = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(f"[{_OBEYED}]")
_SUSPECT = re.compile(f"[{_OBEYED}\u2028\u2029]")


def harmless(text: str) -> str:
    """The text in one line that any terminal shows and none obeys."""
    # Nearly all texts are; and some are looked at for every message.
    if _SUSPECT.search(text) is None:
        return text
    return _UNSAFE.sub("", _SPACES.sub(" ", _SEQUENCES.sub("", text)))


def to_json(value: Any) -> str:
    """JSON that every reader takes and no terminal obeys: what is not a number becomes null."""
    text = msgspec.json.encode(value).decode()
    # As an escape it is the same value to a reader.
    return _SUSPECT.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
