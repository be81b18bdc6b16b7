"""Containers of a batch: their parts, and a container of the same type with other parts.

Lists, tuples and dicts; named tuples and dataclasses (*records*); and dicts with methods of their own, which
are UserDicts. A record or a UserDict is made without its constructor, so that nothing of it is executed.
Knows nothing of what the parts are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any


def record_fields(kind: type) -> tuple[str, ...] | None:
    """The names of the fields of a named tuple or dataclass; None if the type is neither."""
    if issubclass(kind, tuple):
        fields = getattr(kind, "_fields", None)
        return fields if isinstance(fields, tuple) else None
    # Of a class that makes its objects in a way of its own, the fields may not be all.
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


def record_parts(value: Any) -> list[Any]:
    """The values of the fields of a record."""
    if isinstance(value, tuple):
        return list(value)
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def extra_attributes(value: Any) -> set[str]:
    """The names of attributes that a record has besides its fields."""
    return set(getattr(value, "__dict__", ())) - set(record_fields(type(value)) or ())


def make_record(kind: type, parts: Sequence[Any]) -> Any:
    """A record with these values of its fields."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, parts)
    made: Any = object.__new__(kind)
    for name, part in zip(record_fields(kind) or (), parts, strict=True):
        # Frozen dataclasses refuse an ordinary assignment.
        object.__setattr__(made, name, part)
    return made


def make_mapping(kind: type, content: dict[Any, Any]) -> Any:
    """A UserDict of this type with this content."""
    made: Any = object.__new__(kind)
    object.__setattr__(made, "data", content)
    return made


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same type, each of whose parts is changed; any other value as it is.

    A dict of a special type becomes an ordinary one.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(change(part) for part in value)
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if isinstance(value, UserDict):
        made = copy.copy(value)
        made.data = {key: change(part) for key, part in value.data.items()}
        return made
    if record_fields(kind) is not None:
        return make_record(kind, [change(part) for part in record_parts(value)])
    return kind(change(part) for part in value) if isinstance(value, (list, tuple)) else value
