"""All cores at once, for large vectors: each part is worked on for itself, and no bit depends on the cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from w5xde.learn.model.device import core_count, use_threads

# More threads than this wait for memory rather than for cores.
_THREADS_MAX = 8

# By process: threads do not survive a fork, and nodes are forked.
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool() -> ThreadPoolExecutor:
    pool = _pools.get(os.getpid())
    if pool is None:
        threads = min(core_count(), _THREADS_MAX)
        # Each is one of many already: torch shall not split its work again.
        pool = ThreadPoolExecutor(threads, "w5xde-cores", initializer=lambda: use_threads(1))
        _pools.clear()
        _pools[os.getpid()] = pool
    return pool


def on_all_cores(work: Callable[[int], None], count: int) -> None:
    """Call `work` with every number below `count`; the first error is raised when all of them are done."""
    if count <= 1:
        for number in range(count):
            work(number)
        return
    futures = [_pool().submit(work, number) for number in range(count)]
    # All, also after an error: they write into memory that is the caller's again when we return.
    wait(futures)
    for future in futures:
        future.result()
