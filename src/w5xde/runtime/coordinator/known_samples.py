"""Known samples: which samples the cache of each node holds, as far as the coordinator knows.

A node says what its cache holds when it joins, and with each answer whether it stored the samples that came.
What it says is believed: a node that misses a sample says so, and is sent it. A node that misses samples in
many answers in a row is sent every sample from then on. Nodes that share a cache share what is known of it.
Decides nothing about leases, and reads no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from w5xde.errors import JobError
from w5xde.learn.data.payload import Packed, padding_of
from w5xde.learn.data.samples import (
    ByteRows,
    Numbers,
    SampleFormat,
    SampleSet,
    chosen_of,
    hashes_of,
    list_samples,
    listed_numbers,
)
from w5xde.learn.data.sources import Key, MapSource
from w5xde.message_types import DIGEST_BYTES
from w5xde.messages import Update
from w5xde.runtime.pipeline.peer import Peer, SentWork

# After so many answers in a row that miss samples and compute nothing, a cache is said to keep nothing.
MISSES_MAX = 32


class KnownSamples:
    """What is known of all caches of a run, and the hash of every sample that was read and may be kept."""

    def __init__(
        self,
        source: MapSource,
        form: SampleFormat,
        slots: int,
        peers: Callable[[], Iterable[Peer]],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Nodes may keep the first `slots` samples. `failed` hears of data that changes."""
        self._source = source
        self._form = form
        self._peers = peers
        self._failed = failed
        self._hashes: ByteRows = np.zeros((slots, DIGEST_BYTES), np.uint8)
        self._read = SampleSet(slots)

    def joined(self, peer: Peer) -> None:
        """Note what the cache of a new peer holds."""
        announced = peer.announced
        if announced is None:
            return
        peer.samples = SampleSet(min(announced.slots, self._read.size), announced.held)
        for other in self._peers():
            shared = other.samples if other is not peer else None
            if shared is not None and other.announced is not None and other.announced.id == announced.id:
                if shared.size == peer.samples.size:
                    shared.update(peer.samples)
                    peer.samples = shared
                return

    def is_wanted(self, key: Key) -> bool:
        """Whether some node may need this batch to be read."""
        return any(self.needs_reading(peer, key) for peer in self._peers()) or not any(self._peers())

    def needs_reading(self, peer: Peer, key: Key) -> bool:
        """Whether a batch must be read to be sent to this peer; if not, its sample numbers suffice.

        The first batch of each epoch is read again, and compared with what was read before.
        """
        if peer.samples is None or key[1] == 0:
            return True
        numbers = self._numbers(key)
        return not (self._read.has(numbers).all() and peer.samples.has(numbers).all())

    def as_sent(self, peer: Peer, key: Key, packed: Packed | None) -> Packed:
        """A batch as it is sent to this peer: with the samples that it lacks, and numbers for all."""
        numbers = self._numbers(key)
        if packed is None:
            # It was known to hold them all when it was lent the batch. If it does no more, it will say so.
            none = np.zeros(len(numbers), bool)
            listed = list_samples(numbers, none, self._hashes[numbers])
            return Packed(len(numbers), self._form.item(len(numbers)), [], 0, listed)
        rows = self._form.split(packed)
        if peer.samples is None or rows is None:
            return packed
        hashes = hashes_of(numbers, rows)
        if not self._note(numbers, hashes):
            return packed
        sent = ~peer.samples.has(numbers)
        pieces = [rows[sent].reshape(-1).data] if sent.any() else []
        count = sum(map(len, pieces))
        if padding_of(count):
            # A batch that is sent whole may follow.
            pieces.append(memoryview(bytes(padding_of(count))))
            count += padding_of(count)
        return Packed(packed.samples, packed.item, pieces, count, list_samples(numbers, sent, hashes))

    def answered(self, peer: Peer, work: SentWork, update: Update) -> None:
        """Note which samples the peer stored, and which it misses."""
        samples = peer.samples
        if samples is None:
            return
        if update.stored:
            for batches in work.listed.values():
                for count, listed in batches:
                    if listed is not None and listed.sent:
                        samples.add(listed_numbers(listed)[chosen_of(listed.sent, count)])
        for answer in update.answers:
            if answer.missing:
                batches = work.listed[answer.lease]
                missing = chosen_of(answer.missing, sum(count for count, _ in batches), beyond=True)
                at = 0
                for count, listed in batches:
                    if listed is not None:
                        samples.discard(listed_numbers(listed)[missing[at : at + count]])
                    at += count
        if not all(answer.dropped for answer in update.answers):
            peer.misses = 0
        elif any(answer.missing for answer in update.answers):
            peer.misses += 1
            if peer.misses >= MISSES_MAX:
                peer.samples = SampleSet(0)

    def _note(self, numbers: Numbers, hashes: ByteRows) -> bool:
        """Note the hashes of samples that were read; returns whether they are those of before."""
        before = self._read.has(numbers)
        differing = (hashes[before] != self._hashes[numbers[before]]).any(axis=1)
        if differing.any():
            self._failed(
                JobError(
                    f"sample {numbers[before][differing][0]} is another one than when it was first read",
                    code="W5-250",
                    why="nodes keep samples, and would train on the old one",
                    fix="use --data stream, which also reads random augmentation anew in each epoch",
                )
            )
            return False
        inside = numbers < self._read.size
        self._hashes[numbers[inside]] = hashes[inside]
        self._read.add(numbers[inside])
        return True

    def _numbers(self, key: Key) -> Numbers:
        return self._source.indices(*key).numpy().astype(np.uint32)
