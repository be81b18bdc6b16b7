"""The loader: a batch is read when it is asked for, ahead if it is wanted, and kept until it is applied."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.processes import PATIENCE_SECONDS
from w5xde.config import Settings
from w5xde.learn.data.payload import Packed
from w5xde.learn.data.sources import Key, MapSource, Start
from w5xde.runtime.coordinator.loader import AHEAD_BATCHES, INLINE_READ_SECONDS, Loader

SAMPLES = 100  # a batch is one sample


class Watched(Dataset[Any]):
    """Remembers which samples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        with self._changed:
            self.read.append(number)
            self._changed.notify_all()
        return torch.tensor(number)

    def wait_for(self, count: int) -> None:
        """Wait until this many samples have been read."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.read) >= count, PATIENCE_SECONDS)


def run(
    story: Callable[[Loader, Watched, Callable[[Key], Any]], Any],
    *,
    inline: bool,
    start: Start | None = None,
    is_wanted: Callable[[Key], bool] | None = None,
    workers: int = 0,
) -> None:
    """Tell a story of a loader, its data set, and a function that awaits a batch."""
    data = Watched()
    source = MapSource(data, batch_size=1, seed=0, shuffle=False)
    source.draws = False
    main = threading.get_ident()

    async def tell() -> None:
        settings = Settings(batch_size=1, epochs=3, loader_workers=workers)
        loader = Loader(source, settings, start or Start(), is_wanted)
        seconds = 0.0 if inline else 2 * INLINE_READ_SECONDS
        loader.start(read_seconds=seconds, discovered=lambda epoch, samples: None, failed=_raise)

        async def get(key: Key) -> int:
            loop = asyncio.get_running_loop()
            found: asyncio.Future[Packed] = loop.create_future()
            loader.get(key, found.set_result)
            packed = await asyncio.wait_for(found, PATIENCE_SECONDS)
            assert threading.get_ident() == main
            return int(torch.frombuffer(bytearray(packed.pieces[0]), dtype=torch.int64)[0])

        await story(loader, data, get)
        loader.stop()

    asyncio.run(tell())


def _raise(error: BaseException) -> None:
    raise error


def test_quick_data_is_read_when_it_is_asked_for_and_in_any_order() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        for number in (0, 7, 3, 99):
            assert await get((0, number)) == number
        assert await get((2, 50)) == 50
        assert data.read == [0, 7, 3, 99, 50]
        # It is kept until it is applied.
        assert await get((0, 7)) == 7
        assert data.read == [0, 7, 3, 99, 50]
        loader.release([(0, 7)])
        assert await get((0, 7)) == 7
        assert data.read[-1] == 7

    run(story, inline=True)


def test_slow_data_is_read_ahead_in_order_and_each_batch_once() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        for number in range(60):
            assert await get((0, number)) == number
            loader.release([(0, number)])
        await asyncio.to_thread(data.wait_for, 60 + AHEAD_BATCHES)
        assert data.read == list(range(60 + AHEAD_BATCHES))

    run(story, inline=False)


def test_batches_left_over_by_an_earlier_life_come_first() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        assert await get((0, 4)) == 4
        assert await get((0, 2)) == 2
        assert await get((0, 50)) == 50
        assert data.read[:2] == [2, 4]
        assert sorted(set(data.read)) == sorted(data.read)

    run(story, inline=False, start=Start(0, 50, frozenset({(0, 2), (0, 4)})))


def test_what_nobody_wants_is_not_read_unless_it_is_asked_for() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        for number in range(SAMPLES):
            assert await get((0, number)) == number
            loader.release([(0, number)])
        assert sorted(data.read) == list(range(SAMPLES))
        # Later epochs are not read ahead; a node that lost its samples asks in the middle of one.
        assert await get((2, 42)) == 42
        assert await get((1, 17)) == 17
        assert data.read[SAMPLES:] == [42, 17]

    run(story, inline=False, is_wanted=lambda key: key[0] == 0)


def test_what_was_read_ahead_for_nothing_makes_room() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        assert await get((0, 0)) == 0
        await asyncio.to_thread(data.wait_for, AHEAD_BATCHES + 1)
        # Their steps are applied, although nothing asked for these.
        loader.release([(0, number) for number in range(AHEAD_BATCHES + 1)])
        assert await get((0, AHEAD_BATCHES + 1)) == AHEAD_BATCHES + 1
        await asyncio.to_thread(data.wait_for, 2 * AHEAD_BATCHES + 1)

    run(story, inline=False)


def test_worker_processes_go_on_although_later_epochs_are_hardly_asked_for() -> None:
    """Nodes that keep samples ask for the first batch of a later epoch alone; all are read, and dropped."""

    async def story(loader: Loader, data: Watched, get: Any) -> None:
        for number in range(SAMPLES):
            assert await get((0, number)) == number
            loader.release([(0, number)])
        for epoch in (1, 2):
            assert await get((epoch, 0)) == 0
            loader.release([(epoch, number) for number in range(SAMPLES - 1)])
        # Nothing of what was released is kept, also not if it arrives later.
        assert await get((2, SAMPLES - 1)) == SAMPLES - 1
        assert sum(type(each) is Packed for each in gc.get_objects()) <= 2 * AHEAD_BATCHES

    run(story, inline=False, is_wanted=lambda key: key[0] == 0 or key[1] == 0, workers=2)


def test_worker_processes_read_on_to_a_batch_far_ahead() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        assert await get((1, 50)) == 50
        assert await get((0, 70)) == 70

    run(story, inline=False, workers=1)


def test_a_lease_that_waits_for_a_batch_gets_it_although_its_step_is_applied_meanwhile() -> None:
    """Another node had the samples, and was sooner. Without an answer the first node would stay idle."""

    async def story(loader: Loader, data: Watched, get: Any) -> None:
        waiting = asyncio.ensure_future(get((0, 30)))
        await asyncio.sleep(0)
        loader.release([(0, 30)])
        assert await waiting == 30

    run(story, inline=False)
