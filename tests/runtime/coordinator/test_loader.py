"""The loader: a batch is read when it is asked for, ahead if it is wanted, and kept until it is applied."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler

from tests.processes import PATIENCE_SECONDS
from w5xde.config import Settings
from w5xde.learn.data.payload import Packed, ReadBatch, UnreadableBatch
from w5xde.learn.data.recipe import Recipe
from w5xde.learn.data.sources import READ_ATTEMPTS, Key, MapSource, Start
from w5xde.runtime.coordinator.loader import AHEAD_BATCHES, INLINE_READ_SECONDS, Loader

SAMPLES = 100  # a batch is one sample


class Watched(Dataset[Any]):
    """Remembers which samples were read; the torn ones cannot be."""

    def __init__(self, torn: frozenset[int] = frozenset()) -> None:
        self.read: list[int] = []
        self.torn = torn
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        with self._changed:
            self.read.append(number)
            self._changed.notify_all()
        if number in self.torn:
            raise OSError(f"sample {number} is torn")
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
    torn: frozenset[int] = frozenset(),
    sampler: Any = None,
    told: list[Any] | None = None,
) -> None:
    """Tell a story of a loader, its data set, and a function that awaits a batch, or why there is none.

    `told` gets what the loader reports: the sizes of batches by epoch, and failures.
    """
    data, heard = Watched(torn), told if told is not None else []
    source = MapSource(data, batch_size=1, seed=0, shuffle=False, recipe=Recipe(sampler=sampler))
    source.draws = False
    source.try_order()
    main = threading.get_ident()

    async def tell() -> None:
        settings = Settings(batch_size=1, epochs=3, loader_workers=workers)
        loader = Loader(source, settings, start or Start(), is_wanted)
        seconds = 0.0 if inline else 2 * INLINE_READ_SECONDS
        loader.start(
            read_seconds=seconds,
            discovered=lambda epoch, sizes: heard.append((epoch, list(sizes))),
            failed=heard.append if told is not None else _raise,
        )

        async def get(key: Key) -> int | str:
            loop = asyncio.get_running_loop()
            found: asyncio.Future[ReadBatch] = loop.create_future()
            loader.get(key, found.set_result)
            packed = await asyncio.wait_for(found, PATIENCE_SECONDS)
            assert threading.get_ident() == main
            if isinstance(packed, UnreadableBatch):
                return packed.reason
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


@pytest.mark.parametrize(
    ("inline", "workers"), [(True, 0), (False, 0), (False, 1), (False, 2)], ids=["loop", "thread", "1", "2"]
)
def test_in_place_of_a_batch_that_cannot_be_read_comes_the_reason(inline: bool, workers: int) -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        for number in range(12):
            found = await get((0, number))
            if number in data.torn:
                assert found.startswith(
                    f"the data set failed: OSError: sample {number} is torn (test_loader.py"
                )
                # It is not read again for another lease.
                assert await get((0, number)) == found
            else:
                assert found == number
        assert workers or data.read.count(5) == READ_ATTEMPTS

    run(story, inline=inline, workers=workers, torn=frozenset({0, 5, 6, 11}))


def test_a_batch_that_can_be_read_the_second_time_is_read() -> None:
    async def story(loader: Loader, data: Watched, get: Any) -> None:
        class Once(frozenset[int]):
            def __contains__(self, number: object) -> bool:
                return number == 3 and data.read.count(3) == 1

        data.torn = Once()
        assert await get((0, 3)) == 3
        assert data.read.count(3) == 2

    run(story, inline=True)


def test_what_can_be_read_and_not_be_sent_is_unreadable_too() -> None:
    source = MapSource([torch.zeros(2), object(), torch.ones(2)], batch_size=1, seed=0, shuffle=False)
    source.draws = False

    async def tell() -> None:
        loader = Loader(source, Settings(batch_size=1, epochs=1), Start())
        loader.start(read_seconds=0.0, discovered=lambda epoch, samples: None, failed=_raise)
        found: list[ReadBatch] = []
        for number in range(3):
            loader.get((0, number), found.append)
        loader.stop()
        assert [type(each) for each in found] == [Packed, UnreadableBatch, Packed]

    asyncio.run(tell())


# --- samplers -----------------------------------------------------------------------------------------


def backwards(dataset: Any, epoch: int, seed: int) -> list[int]:
    """The last samples first, in each epoch one fewer."""
    return list(range(SAMPLES - epoch - 1, -1, -1))


def test_an_epoch_that_a_sampler_draws_is_drawn_when_the_one_before_it_begins() -> None:
    told: list[Any] = []

    async def story(loader: Loader, data: Watched, get: Any) -> None:
        assert [(epoch, len(sizes)) for epoch, sizes in told] == [(0, 101), (1, 100)]
        assert told[0][1] == [1] * 100 + [0]
        assert await get((0, 0)) == 99
        assert len(told) == 2
        assert await get((1, 3)) == 95
        assert [(epoch, len(sizes)) for epoch, sizes in told[2:]] == [(2, 99)]
        assert await get((2, 0)) == 97
        assert len(told) == 3  # there is no fourth epoch

    run(story, inline=True, sampler=backwards, told=told)


def test_a_run_that_goes_on_hears_of_the_batches_that_are_still_to_come() -> None:
    told: list[Any] = []

    async def story(loader: Loader, data: Watched, get: Any) -> None:
        assert [(epoch, len(sizes)) for epoch, sizes in told] == [(1, 1 + 99 - 40), (2, 99)]
        assert await get((1, 40)) == 58

    run(story, inline=True, sampler=backwards, told=told, start=Start(1, 40, frozenset({(0, 7)})))


def test_an_epoch_that_cannot_be_drawn_ends_the_run_before_it_begins() -> None:
    told: list[Any] = []

    def breaks(dataset: Any, epoch: int, seed: int) -> list[int]:
        return [0, 1] if epoch < 2 else [SAMPLES]

    async def story(loader: Loader, data: Watched, get: Any) -> None:
        assert [epoch for epoch, _ in told] == [0, 1]
        assert await get((1, 1)) == 1
        assert "gave 100, which is no sample" in str(told[-1])

    run(story, inline=True, sampler=breaks, told=told)


class FromGlobals(Sampler[int]):
    """Draws from a global generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return iter(torch.randperm(SAMPLES).tolist())


def test_a_sampler_that_draws_from_the_global_generators_draws_in_a_process_of_its_own() -> None:
    """Here threads may draw too, and the order would depend on when they do."""
    alone = MapSource(Watched(), batch_size=1, seed=0, shuffle=True, recipe=Recipe(sampler=FromGlobals()))
    expected = [int(alone.epoch(epoch).indices[5]) for epoch in range(3)]

    async def story(loader: Loader, data: Watched, get: Any) -> None:
        before = torch.get_rng_state()
        assert [await get((epoch, 5)) for epoch in range(3)] == expected
        assert torch.equal(torch.get_rng_state(), before)

    run(story, inline=True, sampler=FromGlobals())
    # Also where worker processes read, which draw the orders themselves.
    run(story, inline=False, sampler=FromGlobals(), workers=1)
