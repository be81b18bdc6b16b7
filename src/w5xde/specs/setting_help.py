"""What a setting is, in words: its description, its type and its default, for help texts and docstrings.

Reads the schema; knows no values and no command line.
"""

from __future__ import annotations

import re
import textwrap
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta

from w5xde.config import Settings, field_types
from w5xde.specs.command_settings import COMMAND_DEFAULTS, COMMAND_SETTINGS, COMMON, FEW_SETTINGS, GROUPS

_DEFAULTS = Settings()
# How descriptions name a default that is no value, and the defaults that they do not name so.
_DEFAULT = re.compile(r"\(default: ([^()]*)\)")
_OTHERWISE = {
    "local_steps": "grow in rounds; on in async, for tiny models",
    "clip_norm": "no clipping",
    **dict.fromkeys(("epochs", "steps", "seconds"), "no limit"),
}
_WIDTH = 88
_DEEP = " " * 8


def description(setting: str) -> str:
    """What a setting decides."""
    extras = get_args(field_types()[setting])[1:]
    return next(extra.description for extra in extras if isinstance(extra, Meta) and extra.description)


def default_of(command: str, setting: str) -> Any:
    """The default of a setting for this command."""
    return COMMAND_DEFAULTS.get(command, {}).get(setting, getattr(_DEFAULTS, setting))


def default_in_words(setting: str) -> str:
    """The default of a setting that has no value until a run begins."""
    if setting in _OTHERWISE:
        return _OTHERWISE[setting]
    found = _DEFAULT.search(description(setting))
    return found[1] if found is not None else "none"


def bare_type(kind: Any) -> Any:
    """A type without the limits and descriptions of the schema."""
    if get_origin(kind) is Annotated:
        return bare_type(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(bare_type(each) for each in get_args(kind))]  # noqa: UP007 - built from a tuple
    return kind


def setting_type(setting: str) -> Any:
    """The type of a setting's values."""
    return bare_type(field_types()[setting])


def is_shown(command: str, setting: str, *, all_of_them: bool) -> bool:
    """Whether the help of a command shows a setting."""
    return all_of_them or setting in COMMON or len(COMMAND_SETTINGS[command]) <= FEW_SETTINGS


def grouped(command: str) -> dict[str, list[str]]:
    """The settings of a command, by the groups in which help shows them."""
    own = set(COMMAND_SETTINGS[command])
    groups = {title: [each for each in group if each in own] for title, group in GROUPS.items()}
    return {title: group for title, group in groups.items() if group}


def describe_settings(command: str) -> str:
    """All settings of a command, for the docstring of its Python function."""
    lines = []
    for title, group in grouped(command).items():
        lines.append(f"{title}:")
        for setting in group:
            kind, default = _type_text(setting_type(setting)), default_of(command, setting)
            lines.append(f"    {setting}: {kind} = {default!r}")
            lines += textwrap.wrap(
                description(setting), _WIDTH, initial_indent=_DEEP, subsequent_indent=_DEEP
            )
    return "\n".join(lines)


def _type_text(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(repr(each) for each in get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_type_text(each) for each in get_args(kind))
    return "None" if kind is type(None) else str(kind.__name__)
