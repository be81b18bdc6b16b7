"""The exit status of a local node: a number that carries the code of the error which ended it.

The coordinator learns of a local node's end by this number alone. Nodes and coordinator are processes of one
program, so both have the same list of codes. Knows no processes.
"""

from __future__ import annotations

from w5xde.errors import W5xdeError
from w5xde.explanations import EXPLANATIONS

# Above the statuses that the command line uses, which say only of which kind an error is.
_FIRST = 100
_CODES = list(EXPLANATIONS)


def exit_status(error: W5xdeError) -> int:
    """Return the status of a node that ends with this error."""
    return _FIRST + _CODES.index(error.code) if error.code in EXPLANATIONS else error.exit_code


def describe_status(status: int) -> str:
    """Return what a status says, for people: an error code, a number, or the signal that killed the node."""
    if status < 0:
        return f"signal {-status}"
    return f"error {_CODES[status - _FIRST]}" if 0 <= status - _FIRST < len(_CODES) else f"status {status}"
