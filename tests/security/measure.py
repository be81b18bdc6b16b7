"""What is checked without `assert`, so that it is checked under `python -O` too; and what memory was used."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

from w5xde.errors import RemoteProtocolError, StorageError
from w5xde.runtime.durable.sealed_json import Damaged

KIB = 1024
MIB = 1024 * KIB

# The errors by which bytes are refused. Anything else that comes out of a decoder is a bug.
REFUSALS = (RemoteProtocolError, StorageError, Damaged)


class Broken(Exception):
    """A decoder did what none may."""


def require(is_so: bool, what: str) -> None:
    if not is_so:
        raise Broken(what)


def refusal_of(function: Callable[[], object]) -> Exception | None:
    """The documented error by which the bytes were refused, or None if they were accepted."""
    try:
        function()
    except REFUSALS as error:
        return error
    return None


def peak_bytes(function: Callable[[], object]) -> int:
    """How much more memory than before was in use at one time while the function ran."""
    is_ours = not tracemalloc.is_tracing()
    if is_ours:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if is_ours:
            tracemalloc.stop()


def core_seconds(function: Callable[[], object]) -> float:
    """How long this thread was on a core: what others do meanwhile does not count."""
    begun = time.thread_time()
    function()
    return time.thread_time() - begun
