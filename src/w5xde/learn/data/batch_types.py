"""Batch types: the named tuples, dataclasses and UserDicts that batches of a job may be made of.

A batch that travels names the type of such a part. The name is looked up in a table of types that this
process has loaded already, because its own job uses them: those at the top level of the modules in which the
job's functions are, and of modules that these import. So a name from the wire never imports a module, never
becomes the name of an attribute, and never reaches a type that the job has nothing to do with. A type whose
objects do something when they are destroyed is never in the table. Knows no bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from w5xde.learn.job.job import Job
from w5xde.learn.model.containers import record_fields

# Stands for the job's own modules: the file of a job is `__main__` here and `train` there.
OWN = ""
_OURS = "w5xde"
# What a module has at its top level.
Names: TypeAlias = Mapping[str, Any]


class BatchTypes:
    """The types of one job, by their names on the wire: `module:Name`, or `:Name` for the job's own."""

    def __init__(self, types: Mapping[str, type] | None = None) -> None:
        self._types = dict(types or {})
        self._names = {kind: name for name, kind in reversed(self._types.items())}

    @classmethod
    def of(cls, job: Job) -> BatchTypes:
        """The types of a job."""
        parts = [getattr(job, field.name) for field in dataclasses.fields(job)]
        functions = [
            each for part in parts for each in (part.values() if isinstance(part, Mapping) else [part])
        ]
        own = [_names_around(each) for each in functions]
        types: dict[str, type] = {}
        for names in own:
            for kind in _types_in(names):
                types.setdefault(f"{OWN}:{kind.__qualname__}", kind)
        for names in _imported_by(own):
            for kind in _types_in(names):
                types.setdefault(f"{kind.__module__}:{kind.__qualname__}", kind)
        return cls(types)

    def name_of(self, kind: type) -> str | None:
        """The name of a type that nodes with the same job know; None if they may not know it."""
        if kind not in self._names:
            self._look_for_mappings()
        return self._names.get(kind)

    def find(self, name: str) -> type | None:
        """The type of this name, if the job of this process knows it."""
        if name not in self._types:
            self._look_for_mappings()
        return self._types.get(name)

    def _look_for_mappings(self) -> None:
        """Add UserDicts of other modules, which a job hardly ever names: a tokenizer gives a BatchEncoding.

        There are few of them, and they may be loaded later than the job.
        """
        for kind in _subclasses(UserDict):
            name = f"{kind.__module__}:{kind.__qualname__}"
            if _may_be_made(kind) and name not in self._types:
                self._types[name] = kind
                self._names.setdefault(kind, name)


# The types of no job.
NO_TYPES = BatchTypes()


def _names_around(value: Any) -> Names:
    """The names at the top level of the module in which a function or a class is, unless it is ours."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else value
    if not isinstance(value, (type, FunctionType)):
        value = type(value)
    if not _is_foreign(str(value.__module__)):
        return {}
    # A job file may be loaded more than once under one name: a function knows its own module.
    inside = [value] if isinstance(value, FunctionType) else list(vars(value).values())
    for each in inside:
        if isinstance(each, FunctionType):
            return each.__globals__
    module = sys.modules.get(value.__module__)
    return vars(module) if module is not None else {}


def _imported_by(several: Iterable[Names]) -> Iterator[Names]:
    """The names in modules that these have imported, or from which they have a function or a class."""
    for names in several:
        for value in list(names.values()):
            if isinstance(value, ModuleType) and _is_foreign(value.__name__):
                yield vars(value)
            elif isinstance(value, (type, FunctionType)):
                yield _names_around(value)


def _is_foreign(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] not in (_OURS, "builtins")


def _types_in(names: Names) -> Iterator[type]:
    return (value for value in list(names.values()) if isinstance(value, type) and _may_be_made(value))


def _may_be_made(kind: type) -> bool:
    is_container = UserDict in kind.__mro__ or record_fields(kind) is not None
    return is_container and _is_foreign(kind.__module__) and not hasattr(kind, "__del__")


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield from _subclasses(each)
