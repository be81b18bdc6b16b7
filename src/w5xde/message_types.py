"""The types that messages are made of: bounded numbers, texts and bytes, and the two base classes.

Knows no message.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from w5xde.sanitize import harmless

# Names are shown in terminals and logs, so they hold nothing that could be read as markup or a path.
NODE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"

NodeName = Annotated[str, Meta(pattern=NODE_NAME_PATTERN)]
Text = Annotated[str, Meta(max_length=4096)]
NAME_CHARACTERS_MAX = 200
Label = Annotated[str, Meta(max_length=NAME_CHARACTERS_MAX)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
# Far more leases than one Work ever has. An answer of two bytes on the wire takes 150 in memory.
ANSWERS_MAX = 1024
# Far more parameters and buffers than the deepest model has.
ENTRIES_MAX = 100_000
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]
# Far more than four samples and the moving buffers of a model need.
CANARY_BODY_BYTES_MAX = 256 * 1024 * 1024
# A hash of a sample, or of the hashes of a batch's samples; and the id of a node's cache.
DIGEST_BYTES = 16
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
# Bits for 32,768 samples of a lease. A node that misses later ones of a larger lease misses them all.
MISSING_BYTES_MAX = 4096
# What a node that only looks may ask for and send, to measure the link: a slow one takes seconds for that.
PROBE_BYTES_MAX = 1024 * 1024
ProbeBytes = Annotated[int, Meta(ge=0, le=PROBE_BYTES_MAX)]
# An id of 8 bytes and a secret of 16 (a ticket's) or 32 (a node's own).
Proof = Annotated[bytes, Meta(max_length=64)]


class Frozen(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all messages: immutable, without unknown fields, and defaults are not sent."""


class Spoken(Frozen, frozen=True):
    """A message whose texts are shown to people: creating or decoding it makes them harmless."""

    def __post_init__(self) -> None:
        for name, said in msgspec.structs.asdict(self).items():
            if isinstance(said, str):
                msgspec.structs.force_setattr(self, name, harmless(said))

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # Bytes are secrets here: never show them.
        said = msgspec.structs.asdict(self).items()
        return [(name, "***" if isinstance(word, bytes) and word else word) for name, word in said]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={said!r}" for name, said in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"
