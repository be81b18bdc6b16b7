"""Known samples: what a node keeps is not sent to it again, and what it misses is."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import TensorDataset

from w5xde.learn.data.payload import Packed, pack_batch
from w5xde.learn.data.samples import SampleFormat, chosen_of, listed_numbers
from w5xde.learn.data.sources import Key, MapSource
from w5xde.messages import Answer, Update
from w5xde.runtime.coordinator.known_samples import MISSES_MAX, KnownSamples
from w5xde.runtime.pipeline.peer import AnnouncedCache, Peer, SentWork

BATCH, SAMPLES = 4, 18


class Pool:
    """Nodes with caches, and the data that they are sent."""

    def __init__(self, slots: int = SAMPLES) -> None:
        self.values = torch.randn(SAMPLES, 5)
        dataset = TensorDataset(self.values)
        self.source = MapSource(dataset, batch_size=BATCH, seed=0, shuffle=True)
        self.source.draws = False
        form = SampleFormat.of(self.packed((0, 0)).item, BATCH)
        assert form is not None
        self.peers: list[Peer] = []
        self.failures: list[BaseException] = []
        self.known = KnownSamples(self.source, form, slots, lambda: self.peers, self.failures.append)

    def packed(self, key: Key) -> Packed:
        return pack_batch(len(self.source.indices(*key)), self.source.read(*key))

    def join(self, cache: bytes = b"", slots: int = SAMPLES, held: bytes = b"") -> Peer:
        peer = Peer(cast(Any, None), cast(Any, None), name=f"node-{len(self.peers)}", is_ready=True)
        if cache:
            peer.announced = AnnouncedCache(cache, slots, held)
        self.peers.append(peer)
        self.known.joined(peer)
        return peer

    def send(self, peer: Peer, key: Key, *, stored: bool = True, missing: bytes = b"") -> int:
        """Send a batch and hear its answer; returns how many samples were sent."""
        is_read = self.known.needs_reading(peer, key)
        sent = self.known.as_sent(peer, key, self.packed(key) if is_read else None)
        assert sent.listed is not None
        count = int(chosen_of(sent.listed.sent, sent.samples).sum())
        assert listed_numbers(sent.listed).tolist() == self.source.indices(*key).tolist()
        assert sent.body_bytes == sum(map(len, sent.pieces)) >= count * 20
        assert sent.body_bytes % 16 == 0
        work = SentWork([1], 1, 0.0, {1: [(sent.samples, sent.listed)]})
        answer = Answer(1, dropped=bool(missing), missing=missing)
        self.known.answered(peer, work, Update(0, [answer], stored=stored))
        return count


def test_each_sample_is_sent_once_and_then_only_its_number() -> None:
    pool = Pool()
    peer = pool.join(b"cache")
    assert [pool.send(peer, (0, batch)) for batch in range(5)] == [4, 4, 4, 4, 2]
    assert [pool.send(peer, (1, batch)) for batch in range(5)] == [0] * 5
    # All but the first batch need not be read, and are not read ahead.
    assert [pool.known.needs_reading(peer, (1, batch)) for batch in range(5)] == [True, *[False] * 4]
    assert [pool.known.is_wanted((2, batch)) for batch in range(5)] == [True, *[False] * 4]


def test_nodes_of_one_machine_share_their_cache_and_others_do_not() -> None:
    pool = Pool()
    one, two, far, none = pool.join(b"here"), pool.join(b"here"), pool.join(b"there"), pool.join()
    assert pool.send(one, (0, 1)) == 4
    assert (pool.send(two, (0, 1)), pool.send(far, (0, 1))) == (0, 4)
    assert pool.known.needs_reading(none, (0, 1))
    assert pool.known.as_sent(none, (0, 1), packed := pool.packed((0, 1))) is packed
    # Whoever knows the id of a cache shares it, but not with another number of slots.
    assert pool.join(b"here", slots=5).samples is not one.samples


def test_what_is_not_stored_is_sent_again() -> None:
    pool = Pool()
    peer = pool.join(b"cache")
    assert [pool.send(peer, (0, 1), stored=False) for _ in range(3)] == [4, 4, 4]


def test_what_a_node_misses_is_sent_again_and_nothing_else() -> None:
    pool = Pool()
    peer = pool.join(b"cache")
    assert pool.send(peer, (0, 1)) == 4
    assert pool.send(peer, (0, 1), missing=b"\x05") == 0
    assert pool.send(peer, (0, 1)) == 2
    # Samples beyond the last bit are missing too, and more bits mean nothing.
    assert pool.send(peer, (0, 1), missing=b"\xff" * 9) == 0
    assert pool.send(peer, (0, 1)) == 4


def test_a_node_says_what_it_holds_and_a_lie_is_found() -> None:
    pool = Pool()
    peer = pool.join(b"cache", held=b"\xff" * 9)
    # The coordinator reads it once, for its hash.
    assert pool.known.needs_reading(peer, (0, 1))
    assert pool.send(peer, (0, 1)) == 0
    assert not pool.known.needs_reading(peer, (0, 1))
    assert pool.send(peer, (0, 1), missing=b"\x0f") == 0
    assert pool.send(peer, (0, 1)) == 4


def test_a_node_that_misses_samples_again_and_again_is_sent_all_from_then_on() -> None:
    """Its cache does not keep what it stores: without an end, no batch would ever be computed."""
    pool = Pool()
    peer, other = pool.join(b"cache"), pool.join(b"cache")
    assert pool.send(peer, (0, 1)) == 4
    for _ in range(MISSES_MAX):
        assert pool.send(peer, (0, 1), missing=b"\x03") == 0
        assert pool.send(other, (0, 1)) == 2
    assert [pool.send(peer, (0, 1)) for _ in range(3)] == [4, 4, 4]
    assert pool.known.needs_reading(peer, (0, 1))
    # What is known of the cache still holds for others.
    assert pool.send(other, (0, 1)) == 0


def test_a_node_that_computes_again_may_miss_samples_again() -> None:
    pool = Pool()
    peer = pool.join(b"cache")
    for _ in range(2 * MISSES_MAX):
        pool.send(peer, (0, 1))
        assert pool.send(peer, (0, 1), missing=b"\x0f") == 0
    pool.send(peer, (0, 1))
    assert pool.send(peer, (0, 1)) == 0


def test_samples_without_a_slot_are_sent_each_time() -> None:
    for pool, peer_slots in ((Pool(slots=9), SAMPLES), (Pool(), 9)):
        peer = pool.join(b"cache", slots=peer_slots)
        for batch in range(5):
            pool.send(peer, (0, batch))
        assert sum(pool.send(peer, (1, batch)) for batch in range(5)) == SAMPLES - 9


def test_another_sample_under_the_same_number_is_an_error() -> None:
    pool = Pool()
    peer = pool.join(b"cache")
    for batch in range(5):
        pool.send(peer, (0, batch))
    pool.values[int(pool.source.indices(1, 0)[2])] += 1
    sent = pool.known.as_sent(peer, (1, 0), pool.packed((1, 0)))
    assert sent.listed is None
    [error] = pool.failures
    assert cast(Any, error).code == "W5-250"
    number = np.int64(pool.source.indices(1, 0)[2])
    assert f"sample {number} is another one" in str(error)


def test_a_batch_of_another_form_is_sent_whole() -> None:
    pool = Pool()
    peer = pool.join(b"cache")
    odd = pack_batch(BATCH, torch.zeros(BATCH, 6))
    assert pool.known.as_sent(peer, (0, 1), odd) is odd
    assert pool.known.needs_reading(peer, (0, 1))
