"""Listed batches: right samples make the batch, missing ones are named, and nonsense is the peer's fault."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from w5xde.errors import RemoteProtocolError
from w5xde.learn.data.payload import Packed, pack_batch
from w5xde.learn.data.samples import SampleFormat, chosen_of, hashes_of, list_samples
from w5xde.message_types import TensorAt, Value
from w5xde.messages import Batch, Loan, Rules, SampleList
from w5xde.runtime.node.listed_batches import ListedBatches
from w5xde.runtime.node.sample_cache import CacheKey, SampleCache, open_cache

COUNT = 4
VALUES = torch.arange(40.0).reshape(10, 4)
PACKED = pack_batch(COUNT, VALUES[[9, 2, 5, 7]])
NUMBERS = np.array([9, 2, 5, 7], np.uint32)
RULES = Rules("sync", 0, "fp32", 1, "cached", data_samples=10, data_digest="x", sample_bytes=16)


def rows_of(packed: Packed) -> Any:
    form = SampleFormat.of(packed.item, packed.samples)
    assert form is not None
    return form.split(packed)


ROWS = rows_of(PACKED)
HASHES = hashes_of(NUMBERS, ROWS)


def sent(*places: int) -> tuple[Batch, bytearray]:
    """The batch with the samples at these places in its body."""
    chosen = np.isin(np.arange(COUNT), places)
    listed = list_samples(NUMBERS, chosen, HASHES)
    return Batch(0, COUNT, 0, PACKED.item, listed), bytearray(ROWS[chosen].tobytes())


@pytest.fixture
def cache(tmp_path: Path) -> SampleCache:
    return open_cache(CacheKey("run", "x", 10, 16), 2**20, tmp_path)


def read(cache: SampleCache, batch: Batch, body: bytearray) -> tuple[Any, list[int], bool]:
    """The batch, the places of missing samples, and whether those that came were stored."""
    listed = ListedBatches(cache, RULES, body)
    assert batch.listed is not None
    value = listed.read(batch, batch.listed)
    missing = listed.take_missing(Loan(1, 0, 0, 1, 1, COUNT, [batch]))
    places = np.flatnonzero(chosen_of(missing, COUNT)).tolist()
    assert bool(missing) == bool(places) == (value is None)
    return value, places, listed.stored


def test_samples_that_came_once_make_the_batch_again(cache: SampleCache) -> None:
    for places in ((0, 1, 2, 3), (), (2,), ()):
        value, missing, stored = read(cache, *sent(*places))
        assert torch.equal(value, VALUES[[9, 2, 5, 7]])
        assert (missing, stored) == ([], True)


def test_what_is_not_there_is_missing_and_what_came_is_kept_all_the_same(cache: SampleCache) -> None:
    assert read(cache, *sent(1, 3)) == (None, [0, 2], True)
    assert read(cache, *sent()) == (None, [0, 2], True)
    value, missing, _ = read(cache, *sent(0, 2))
    assert torch.equal(value, VALUES[[9, 2, 5, 7]])
    assert missing == []


def test_a_forged_sample_with_its_hash_is_not_the_coordinators(cache: SampleCache) -> None:
    forged = ROWS.copy()
    forged[1, 0] ^= 1
    cache.write(NUMBERS, forged, hashes_of(NUMBERS, forged))
    # Which of them is wrong cannot be known, so all are thrown away.
    assert read(cache, *sent()) == (None, [0, 1, 2, 3], True)
    assert not any(cache.held())


def test_a_cache_that_stores_nothing_more_says_so(cache: SampleCache) -> None:
    cache.trouble = "the disk is full"
    value, missing, stored = read(cache, *sent(0, 1, 2, 3))
    assert torch.equal(value, VALUES[[9, 2, 5, 7]])
    assert (missing, stored) == ([], False)


def changed(**fields: Any) -> SampleList:
    right = list_samples(NUMBERS, np.zeros(COUNT, bool), HASHES)
    return SampleList(**{"numbers": right.numbers, "sent": right.sent, "check": right.check, **fields})


@pytest.mark.parametrize(
    ("batch", "body_bytes"),
    [
        (Batch(0, COUNT, 0, PACKED.item, changed(numbers=b"")), 0),
        (Batch(0, COUNT, 0, PACKED.item, changed(numbers=b"\0" * 15)), 0),
        (Batch(0, COUNT, 0, PACKED.item, changed(numbers=b"\0" * 20)), 0),
        (Batch(0, COUNT, 0, PACKED.item, changed(numbers=b"\x0a\0\0\0" * 4)), 0),
        (Batch(0, COUNT, 0, PACKED.item, changed(numbers=b"\xff" * 16)), 0),
        (Batch(0, COUNT, 0, PACKED.item, changed(sent=b"\x0f")), 63),
        (Batch(0, COUNT, 2**61, PACKED.item, changed(sent=b"\x0f")), 64),
        (Batch(0, COUNT, 0, PACKED.item, changed(sent=b"\x0f", check=bytes(16))), 64),
        (Batch(0, COUNT, 0, Value(1), changed()), 0),
        (Batch(0, COUNT, 0, TensorAt("float32", (COUNT, 2**60), 0), changed()), 0),
        (Batch(0, COUNT, 0, TensorAt("float32", (COUNT, 5), 0), changed()), 0),
        (Batch(0, COUNT, 0, TensorAt("float32", (5, 4), 0), changed()), 0),
        (Batch(0, COUNT, 0, TensorAt("float32", (COUNT, 4), 64), changed()), 0),
        (Batch(0, COUNT, 0, TensorAt("float32", (COUNT, 4), 0, True), changed()), 0),
    ],
    ids=str,
)
def test_a_list_that_makes_no_sense_is_refused(batch: Batch, body_bytes: int, cache: SampleCache) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read(cache, batch, bytearray(body_bytes))
    assert caught.value.code == "W5-120"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    numbers=st.binary(max_size=20) | st.lists(st.integers(0, 12), min_size=4, max_size=4),
    bits=st.binary(max_size=3),
    check=st.binary(max_size=16),
    at=st.integers(0, 2**62 - 1) | st.integers(0, 70),
    body=st.binary(max_size=80),
)
def test_any_list_gives_a_batch_or_the_peers_error(
    numbers: Any, bits: bytes, check: bytes, at: int, body: bytes, cache: SampleCache
) -> None:
    said = numbers if isinstance(numbers, bytes) else np.array(numbers, "<u4").tobytes()
    batch = Batch(0, COUNT, at, PACKED.item, SampleList(said, bits, check))
    with contextlib.suppress(RemoteProtocolError):
        value, missing, _ = read(cache, batch, bytearray(body))
        assert (value is None) == bool(missing)
