"""The types that messages are made of: bounded numbers, texts, bytes, base classes, batches, small records.

Knows no message.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

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
# A bit for each entry of a layout, or for each module of a model.
Bits = Annotated[bytes, Meta(max_length=ENTRIES_MAX // 8)]
# Far more losses than a script has.
LossNames = Annotated[list[Annotated[str, Meta(min_length=1, max_length=64)]], Meta(max_length=256)]
# An id of 8 bytes and a secret of 16 (a ticket's) or 32 (a node's own).
Proof = Annotated[bytes, Meta(max_length=64)]

# --- the code of a job ----------------------------------------------------------------------------

# Files lie beside the job file or in folders there. No name can leave its folder or be hidden: it has no dot
# but that of `.py`, and no character that a terminal or a shell obeys.
_CODE_PART = "[A-Za-z0-9_][A-Za-z0-9_-]{0,63}"
CODE_NAME_PATTERN = rf"^({_CODE_PART}/){{0,7}}{_CODE_PART}\.py\Z"
CODE_REFERENCE_PATTERN = rf"^{_CODE_PART}\.py(:[A-Za-z_][A-Za-z0-9_]{{0,63}})?\Z"
# Far more code than a person reads before running it; and on a slow link still less than a minute.
CODE_FILES_MAX = 256
CODE_BYTES_MAX = 4 * 1024 * 1024
CodeName = Annotated[str, Meta(pattern=CODE_NAME_PATTERN, max_length=NAME_CHARACTERS_MAX)]
CodeReference = Annotated[str, Meta(pattern=CODE_REFERENCE_PATTERN)]
# Names of files and their bytes.
CodeSizes = Annotated[
    dict[CodeName, Annotated[int, Meta(ge=0, le=CODE_BYTES_MAX)]],
    Meta(min_length=1, max_length=CODE_FILES_MAX),
]
Sha256 = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
# Users read names and versions of packages in commands to type, so these hold nothing that a shell obeys.
PACKAGES_MAX = 64
PACKAGE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
VERSION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+!-]{0,63}\Z"
MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,63}\Z"
_Package = Annotated[str, Meta(pattern=PACKAGE_PATTERN)]
# Names of packages and their versions.
Versions = Annotated[
    dict[_Package, Annotated[str, Meta(pattern=VERSION_PATTERN)]], Meta(max_length=PACKAGES_MAX)
]
# Names of modules and the packages that they belong to; empty: to none.
ImportedModules = Annotated[
    dict[
        Annotated[str, Meta(pattern=MODULE_PATTERN)],
        Annotated[str, Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?\Z")],
    ],
    Meta(max_length=PACKAGES_MAX),
]
# More metrics than anybody looks at, and more batches than a validation lease has: all fit into an answer.
METRICS_MAX, METRIC_ROWS_MAX = 64, 16
MetricNames = Annotated[list[Label], Meta(max_length=METRICS_MAX)]
MetricRow = Annotated[list[float], Meta(max_length=METRICS_MAX)]
MetricRows = Annotated[list[MetricRow], Meta(max_length=METRIC_ROWS_MAX)]


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


# --- a batch, described -------------------------------------------------------------------------


class TensorAt(Frozen, frozen=True, array_like=True, tag="t"):
    """A tensor whose bytes start at `offset` of the body."""

    dtype: Label
    shape: Shape
    offset: Count
    requires_grad: bool = False


class Value(Frozen, frozen=True, array_like=True, tag="v"):
    """A number, a string, a boolean or None."""

    value: bool | int | float | str | None


class Bytes(Frozen, frozen=True, array_like=True, tag="b"):
    """Bytes that belong to no tensor."""

    value: bytes


class ListOf(Frozen, frozen=True, array_like=True, tag="l"):
    items: list[Item]


class TupleOf(Frozen, frozen=True, array_like=True, tag="u"):
    items: list[Item]


class DictOf(Frozen, frozen=True, array_like=True, tag="d"):
    keys: list[str | int | float | bool | None]
    items: list[Item]


class RecordOf(Frozen, frozen=True, array_like=True, tag="r"):
    """A named tuple or a dataclass: the name of its type, and its fields."""

    kind: Label
    fields: list[Label]
    items: list[Item]


class MappingOf(Frozen, frozen=True, array_like=True, tag="m"):
    """A dict with methods of its own (a UserDict): the name of its type, and its content."""

    kind: Label
    keys: list[str | int | float | bool | None]
    items: list[Item]


Container: TypeAlias = ListOf | TupleOf | DictOf | RecordOf | MappingOf
Item: TypeAlias = TensorAt | Value | Bytes | ListOf | TupleOf | DictOf | RecordOf | MappingOf
# --- records that several modules know --------------------------------------------------------------


class SampleList(Frozen, frozen=True, array_like=True):
    """The samples of a batch by their numbers, for a node that keeps samples.

    The body holds the bytes of those samples alone whose bits are set in `sent`, one after the other.
    """

    # Four bytes for each sample, the lowest first.
    numbers: bytes
    # A bit for each sample, the lowest first; bits at the end that are not set may be left out.
    sent: bytes
    # The hash of the hashes of all samples.
    check: Digest


class Fill(Frozen, frozen=True, array_like=True):
    """How the canary fills a parameter: `clip(mean + std * noise, low, high)`."""

    mean: float
    std: float
    low: float
    high: float


class StepRates(Frozen, frozen=True, array_like=True):
    """The learning rates with which a node makes the steps of a column, in rounds mode.

    `of_steps` has a row for each step, and in it the rate of each of the optimizer's groups; `momenta`
    likewise, if there is a schedule, which may change them. `sums_before`: for each group, the sum of its
    rates in the round before.
    """

    # How many steps were made before.
    step: Count
    of_steps: list[list[float]]
    momenta: list[list[float]] = field(default_factory=list)
    sums_before: list[float] = field(default_factory=list)


class Call(Frozen, frozen=True, array_like=True):
    """How the parts of one call of a pool are computed: with this loss, on a model with these flags.

    Bits are counted from the lowest of the first byte; those at the end that are not set may be left out.
    """

    loss: Label
    # A bit for each trained entry of the layout: set if it requires no gradient now.
    frozen: Bits = b""
    # A bit for each module of the model, in the order of torch's `modules()`: set if it evaluates.
    evaluating: Bits = b""
    # Which of Python's and numpy's global generators this loss draws from.
    seeds_python: bool = False
    seeds_numpy: bool = False
