"""Listed batches: batches that arrive as sample numbers, put together from the cache and from the body.

Every sample has to have its hash, and all together the hash that the coordinator sent: what is in the file
is never trained on because it is there. Knows no leases and no connections.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from w5xde.errors import RemoteProtocolError
from w5xde.learn.data.batch_types import NO_TYPES, BatchTypes
from w5xde.learn.data.payload import unpack
from w5xde.learn.data.samples import (
    ByteRows,
    Choice,
    SampleFormat,
    bits_of,
    check_of,
    chosen_of,
    hashes_of,
    listed_numbers,
)
from w5xde.message_types import MISSING_BYTES_MAX, SampleList
from w5xde.messages import Batch, Loan, Rules
from w5xde.protocol.wire import Body
from w5xde.runtime.node.sample_cache import SampleCache

_NOTHING: ByteRows = np.empty((0, 0), np.uint8)


class ListedBatches:
    """Puts the listed batches of one Work together."""

    def __init__(self, cache: SampleCache, rules: Rules, body: Body, types: BatchTypes = NO_TYPES) -> None:
        self._cache = cache
        self._types = types
        self._rules = rules
        self._body = body
        self._missing: dict[int, Choice] = {}
        # Whether all samples that came are in the cache now, as far as it has slots for them.
        self.stored = True

    def read(self, batch: Batch, listed: SampleList) -> Any:
        """The batch; None if samples of it are missing. Stores the samples that came."""
        form = SampleFormat.of(batch.item, batch.samples)
        if form is None or form.sample_bytes != self._rules.sample_bytes:
            raise RemoteProtocolError("a list of samples for a batch of another form", code="W5-120")
        numbers = listed_numbers(listed) if len(listed.numbers) == 4 * batch.samples else None
        if numbers is None or int(numbers.max()) >= self._rules.data_samples:
            raise RemoteProtocolError(
                f"a list that does not name {batch.samples} of the run's samples", code="W5-120"
            )
        sent = chosen_of(listed.sent, batch.samples)
        rows, written = self._cache.read(numbers) if not sent.all() else (_NOTHING, _NOTHING)
        if sent.any():
            came = self._came(batch.at, int(sent.sum()))
            if sent.all():
                rows = came
            else:
                rows[sent] = came
        hashes = hashes_of(numbers, rows)
        if sent.any():
            self.stored &= self._cache.write(numbers[sent], rows[sent], hashes[sent])
        missing = ~sent if sent.all() else ~sent & (hashes != written).any(axis=1)
        if not missing.any() and check_of(hashes) != listed.check:
            if sent.all():
                raise RemoteProtocolError("samples that do not have the hash of their batch", code="W5-120")
            # Samples of other data, which a run of the same name left.
            missing = ~sent
        if missing.any():
            self._cache.discard(numbers[missing])
            self._missing[batch.index] = missing
            return None
        return unpack(batch.item, form.join(rows), types=self._types)

    def take_missing(self, loan: Loan) -> bytes:
        """Of a loan whose batches were read: a bit for each sample that is missing; empty if none is."""
        found, self._missing = self._missing, {}
        if not found:
            return b""
        parts = [found.get(batch.index, np.zeros(batch.samples, bool)) for batch in loan.batches]
        return bits_of(np.concatenate(parts)).tobytes()[:MISSING_BYTES_MAX]

    def _came(self, at: int, count: int) -> ByteRows:
        """The samples in the body."""
        sample_bytes = self._rules.sample_bytes
        if at + count * sample_bytes > len(self._body):
            raise RemoteProtocolError("samples beyond the end of their body", code="W5-120")
        return np.frombuffer(self._body, np.uint8, count * sample_bytes, at).reshape(count, sample_bytes)
