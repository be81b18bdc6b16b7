"""Work on the independent parts of a large vector on all cores, and the one that all share: addition."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from torch import Tensor

from w5xde.learn.model.device import core_count, use_threads

# With more threads than this, memory is the bottleneck.
_THREADS_MAX = 8

# Numbers of a share of a long vector. A multiple of what any kernel takes at a time, so that a kernel treats
# each number as it would without the cut; and always the same, so that sums over shares are too.
SHARE_NUMBERS = 4 * 1024 * 1024

# By process id: threads do not survive a fork, and nodes are forked.
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool() -> ThreadPoolExecutor:
    pool = _pools.get(os.getpid())
    if pool is None:
        threads = min(core_count(), _THREADS_MAX)
        # One of many threads already: torch must not split its work again.
        pool = ThreadPoolExecutor(threads, "w5xde-cores", initializer=lambda: use_threads(1))
        _pools.clear()
        _pools[os.getpid()] = pool
    return pool


def shares(count: int) -> list[slice]:
    """A vector of this many numbers in shares for `on_all_cores`: one, if it is short."""
    starts = range(0, max(1, count), SHARE_NUMBERS)
    return [slice(start, min(count, start + SHARE_NUMBERS)) for start in starts]


def on_all_cores(work: Callable[[int], None], count: int) -> None:
    """Call `work` with every number below `count`; raises the first error after all calls have ended."""
    if count == 1:
        work(0)
        return
    futures = [_pool().submit(work, number) for number in range(count)]
    # All, also after an error: they write into memory of the caller.
    wait(futures)
    for future in futures:
        future.result()


def add_to(total: Tensor, more: Tensor) -> None:
    """Add a vector to another of the same length, in place."""
    cuts = shares(total.numel()) if total.device.type == "cpu" else []

    def add(number: int) -> None:
        total[cuts[number]].add_(more[cuts[number]])

    if len(cuts) < 2:
        total.add_(more)
    else:
        # Two cores move more memory than one.
        on_all_cores(add, len(cuts))
