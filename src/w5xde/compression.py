"""The language of the setting `compress`: the names of stages, their order, and the two directions.

    spec     none, or stages joined by |     bf16 | shuffle | zstd:1
    setting  auto, auto:lossy, a spec, or one for each direction     up: int8 | zstd, down: lz4

A spec has at most one stage of each kind, in this order: numbers (fewer bits for each), order (bytes
rearranged so that they compress well), compressor. Only parses text; `learn/codecs` does the work.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

AUTO = "auto"
AUTO_LOSSY = "auto:lossy"
NONE = "none"
# Parameters in 8 bits or fewer would do harm: every node would compute on other weights than the
# coordinator's, and no later update could send the rounding error, as it can for gradients.
COARSE = frozenset({"int8", "q4"})
# May go down where the coordinator sends differences: they decode to the same bits on every machine, so all
# replicas stay equal, and a later difference can make up for the rounding error.
_BOTH_WAYS = frozenset({"q4"})
LOSSY = frozenset({"fp16", "bf16", *COARSE})

_STAGE = re.compile(r"([a-z][a-z0-9_]*)(?::(-?\d{1,9}))?")
_DIRECTION = re.compile(r"(\w+)\s*:\s*(.*)", re.DOTALL)


class Kind(IntEnum):
    """The kind of a stage. Stages come in this order, at most one of each kind."""

    NUMBERS = 0
    ORDER = 1
    COMPRESSOR = 2


@dataclass(frozen=True, slots=True)
class KnownStage:
    """A stage that specs may name: its kind and, if it takes a number, its range and its default."""

    kind: Kind
    lowest: int = 0
    highest: int = 0
    default: int | None = None


_NAMES: dict[str, KnownStage] = {
    "fp16": KnownStage(Kind.NUMBERS),
    "bf16": KnownStage(Kind.NUMBERS),
    "int8": KnownStage(Kind.NUMBERS),
    "q4": KnownStage(Kind.NUMBERS),
    "shuffle": KnownStage(Kind.ORDER),
    "zlib": KnownStage(Kind.COMPRESSOR, 0, 9, 1),
    "lz4": KnownStage(Kind.COMPRESSOR, 1, 65537, 1),
    "lz4frame": KnownStage(Kind.COMPRESSOR),
    # Below -100 zstd hardly compresses, and above 19 it needs much more memory.
    "zstd": KnownStage(Kind.COMPRESSOR, -100, 19, 1),
}
# The default acceleration of lz4 is written without its number.
_IMPLIED = {("lz4", 1)}
_RULE = (
    "a spec is none, or at most one of fp16, bf16, int8 and q4, then perhaps shuffle, "
    "then at most one of zlib, lz4, lz4frame and zstd, joined by |"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a spec, with its number if it takes one."""

    name: str
    kind: Kind
    number: int | None = None

    def __str__(self) -> str:
        is_plain = self.number is None or (self.name, self.number) in _IMPLIED
        return self.name if is_plain else f"{self.name}:{self.number}"


@dataclass(frozen=True, slots=True)
class Directions:
    """The compression of each direction: gradients up to the coordinator, parameters down to the nodes."""

    up: str
    down: str


def is_lossy(setting: str) -> bool:
    """Whether this setting may round what is sent."""
    if setting in (AUTO, AUTO_LOSSY):
        return setting == AUTO_LOSSY
    return any(stage.name in LOSSY for stage in parse_spec(setting))


def add_name(name: str, kind: Kind) -> None:
    """Let specs name another stage, which `learn.codecs.pipeline.register` provides."""
    if not _STAGE.fullmatch(name) or name in (*_NAMES, NONE, AUTO):
        raise ValueError(f"a stage cannot be called {name!r}")
    _NAMES[name] = KnownStage(kind)


def parse_spec(text: str) -> tuple[Stage, ...]:
    """The stages of a spec, in order; empty for `none`. ValueError if it is not a spec."""
    if text.strip() == NONE:
        return ()
    stages = tuple(_parse_stage(part.strip(), text) for part in text.split("|"))
    for before, after in pairwise(stages):
        if before.kind >= after.kind:
            raise ValueError(f"{text!r} has {after.name} after {before.name}: {_RULE}")
    return stages


def spell(stages: tuple[Stage, ...]) -> str:
    """The canonical text of these stages."""
    return " | ".join(map(str, stages)) or NONE


def parse_compress(setting: str, *, both_ways: bool = False) -> Directions:
    """The setting `compress` for each direction; a direction that it does not name is `auto`.

    `both_ways`: the coordinator sends differences instead of parameters, so that q4 may go down too.
    """
    given = {}
    for part in setting.split(","):
        found = _DIRECTION.fullmatch(part.strip())
        # zstd:1 and auto:lossy have a colon too: a direction is a word that names no stage.
        if found is None or found[1] in (*_NAMES, AUTO):
            if "," in setting:
                raise ValueError(f"compress {setting!r} must name its directions, like up: bf16, down: lz4")
            up, down = (_parse_direction(setting, direction, both_ways) for direction in ("up", "down"))
            return Directions(up, down)
        direction, spec = found[1], found[2]
        if direction not in ("up", "down"):
            hint = _hint(direction, ["up", "down", *_NAMES, AUTO])
            raise ValueError(f"compress knows no direction {direction!r}, only up and down{hint}")
        if direction in given:
            raise ValueError(f"compress {setting!r} names {direction} twice")
        given[direction] = _parse_direction(spec, direction, both_ways)
    return Directions(given.get("up", AUTO), given.get("down", AUTO))


def _parse_direction(text: str, direction: str, both_ways: bool) -> str:
    text = text.strip()
    if text in (AUTO, AUTO_LOSSY):
        return text
    try:
        stages = parse_spec(text)
    except ValueError as error:
        raise ValueError(f"compress: {error}") from None
    if direction == "down":
        refuse_down(stages, both_ways=both_ways)
    return spell(stages)


def refuse_down(stages: tuple[Stage, ...], *, both_ways: bool = False) -> None:
    """Refuse a stage that is too coarse for parameters, or for differences if `both_ways`; ValueError."""
    refused = COARSE - _BOTH_WAYS if both_ways else COARSE
    for stage in stages:
        if stage.name in refused:
            raise ValueError(f"compress: {stage.name} is for gradients only, say  up: {spell(stages)}")


def _parse_stage(part: str, text: str) -> Stage:
    found = _STAGE.fullmatch(part)
    known = _NAMES.get(found[1]) if found else None
    if found is None or known is None:
        if part in (AUTO, AUTO_LOSSY, NONE):
            raise ValueError(f"{part} stands alone, not as a part of {text!r}: {_RULE}")
        hint = _hint(part.partition(":")[0], [*_NAMES, NONE, AUTO])
        raise ValueError(f"{text!r} names no codec {part!r}{hint}: {_RULE}")
    name, given = found[1], found[2]
    if given is None:
        return Stage(name, known.kind, known.default)
    if known.default is None:
        raise ValueError(f"{name} in {text!r} takes no number")
    number = int(given)
    if not known.lowest <= number <= known.highest:
        raise ValueError(f"{name} in {text!r} takes a number from {known.lowest} to {known.highest}")
    return Stage(name, known.kind, number)


def _hint(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
