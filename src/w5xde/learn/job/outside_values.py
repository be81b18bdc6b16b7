"""The values outside of a loss that it reads: variables of its module, and of functions around it.

Nodes have them as they were when the pool was entered, or as the file sets them. A loop that changes one of
them, as a weight that grows with the epochs, would compute one thing here and nodes another. Looks at names
in the function itself, not in those that it calls. Knows nothing of pools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_PLAIN = (bool, int, float, str, bytes, type(None))


def outside_values(function: Callable[..., Any]) -> dict[str, Any]:
    """The plain values that a function reads by name from outside; none for objects that can be called."""
    return {name: value for name, value in outside_names(function).items() if isinstance(value, _PLAIN)}


def outside_names(function: Callable[..., Any]) -> dict[str, Any]:
    """Everything that a function reads by name from outside; nothing for objects that can be called."""
    bare = inspect.unwrap(function)
    if inspect.ismethod(bare):
        bare = bare.__func__
    if not inspect.isfunction(bare):
        return {}
    found = inspect.getclosurevars(bare)
    return {**found.globals, **found.nonlocals}
