"""Work on the independent parts of a large vector on all cores. Knows nothing of the work itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from w5xde.learn.model.device import core_count, use_threads

# With more threads than this, memory is the bottleneck.
_THREADS_MAX = 8

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
