"""Shared memory: where a vector lies, when its place is free again, and what neither side can do."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from w5xde.config import Settings
from w5xde.errors import RemoteProtocolError
from w5xde.learn.model.layout import Blueprint
from w5xde.learn.model.route import SHARED_BYTES_MIN
from w5xde.learn.train.vectors import SlotVectors
from w5xde.messages import TRAINED, Entry, Layout
from w5xde.runtime.coordinator.local.memory import LocalMemory
from w5xde.runtime.system import shared_memory
from w5xde.runtime.system.shared_memory import (
    PAGE_BYTES,
    SLOTS,
    LocalShare,
    NodeRegions,
    StateRegion,
    UpdateRegion,
)

# No whole number of pages.
VECTOR_BYTES = 3 * PAGE_BYTES + 128
STATE_BYTES = 5 * PAGE_BYTES + 64


def both_sides() -> tuple[LocalShare, NodeRegions]:
    """The coordinator's and the node's side, here in one process."""
    share = LocalShare(UpdateRegion(VECTOR_BYTES), StateRegion(STATE_BYTES))
    return share, NodeRegions([os.dup(each) for each in share.descriptors])


def lent(node: NodeRegions, slot: int, byte: int = 7) -> int:
    """Write into a slot and lend it; returns its place in the region."""
    memory = node.slots(VECTOR_BYTES)[slot]
    memory[:] = bytes([byte]) * VECTOR_BYTES
    place = node.offset_of(memory)
    assert place is not None
    return place


def test_a_vector_is_read_where_the_node_wrote_it_and_then_its_slot_is_free() -> None:
    share, node = both_sides()
    place = lent(node, 1)
    assert node.is_lent(1)
    body = share.body_at(place, VECTOR_BYTES)
    assert bytes(body) == b"\7" * VECTOR_BYTES
    vector = torch.frombuffer(body, dtype=torch.uint8)
    del body
    assert node.is_lent(1)
    part = vector[5:9]
    del vector
    assert node.is_lent(1)
    del part
    assert not node.is_lent(1)


def test_bytes_that_lie_elsewhere_are_sent() -> None:
    share, node = both_sides()
    assert node.offset_of(memoryview(bytearray(VECTOR_BYTES))) is None
    assert share.offset_of(memoryview(bytearray(STATE_BYTES))) is None


@pytest.mark.parametrize(
    ("place", "count"),
    [
        (0, 8),
        (PAGE_BYTES - 1, 8),
        (PAGE_BYTES + 8, 8),
        (PAGE_BYTES, VECTOR_BYTES + 1),
        (PAGE_BYTES + SLOTS * 4 * PAGE_BYTES, 8),
        (2**64 - 1, 2**64 - 1),
    ],
)
def test_a_place_that_is_no_slot_breaks_the_protocol(place: int, count: int) -> None:
    share, _ = both_sides()
    with pytest.raises(RemoteProtocolError, match="where no slot is"):
        share.body_at(place, count)


def test_a_slot_that_is_in_use_cannot_be_sent_again() -> None:
    share, node = both_sides()
    place = lent(node, 0)
    body = share.body_at(place, VECTOR_BYTES)
    with pytest.raises(RemoteProtocolError, match="sent twice"):
        share.body_at(place, VECTOR_BYTES)
    del body
    share.body_at(place, VECTOR_BYTES)


def test_parameters_beyond_the_state_break_the_protocol() -> None:
    _, node = both_sides()
    with pytest.raises(RemoteProtocolError, match="of shared memory that has"):
        node.body_at(STATE_BYTES, PAGE_BYTES)


def test_a_new_connection_frees_what_was_never_read_and_nothing_else() -> None:
    share, node = both_sides()
    read = share.body_at(lent(node, 0), VECTOR_BYTES)
    lent(node, 1)
    share.updates.reset()
    assert [node.is_lent(0), node.is_lent(1)] == [True, False]
    del read


def test_a_node_takes_only_slots_that_the_coordinator_does_not_use() -> None:
    share, node = both_sides()
    blueprint = Blueprint(Layout([Entry("w", "float32", (VECTOR_BYTES // 4,), TRAINED)]))
    vectors = SlotVectors(blueprint, node)
    taken = [vectors.take() for _ in range(SLOTS)]
    assert None not in taken
    assert vectors.take() is None
    first = taken[0]
    assert first is not None
    place = node.offset_of(first.memory)
    assert place is not None
    body = share.body_at(place, VECTOR_BYTES)
    # Sent, and recycled; but still in use over there.
    assert vectors.recycle(first)
    assert vectors.take() is None
    del body
    assert vectors.take() is first


def test_the_size_of_a_region_is_fixed() -> None:
    share, _ = both_sides()
    for descriptor in share.descriptors:
        size = os.fstat(descriptor).st_size
        for other in (size // 2, 2 * size):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, other)


def test_nobody_but_the_coordinator_can_write_into_the_state() -> None:
    state = StateRegion(STATE_BYTES)
    with pytest.raises(PermissionError):
        mmap.mmap(state.descriptor, STATE_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(state.descriptor, b"x", 0)


@pytest.mark.parametrize("has_pagemap", [True, False])
def test_what_a_node_writes_is_its_own_until_it_follows_again(
    has_pagemap: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    if not has_pagemap:
        monkeypatch.setattr(shared_memory, "_PAGEMAP", tmp_path / "none")  # type: ignore[operator]
    state = StateRegion(STATE_BYTES)
    node = NodeRegions([os.dup(UpdateRegion(VECTOR_BYTES).descriptor), os.dup(state.descriptor)])
    assert node.state is not None
    seen = node.state.memory
    state.memory[:] = b"a" * STATE_BYTES
    assert bytes(seen[:STATE_BYTES]) == b"a" * STATE_BYTES
    seen[PAGE_BYTES + 3] = ord("x")
    assert state.memory[PAGE_BYTES + 3] == ord("a")
    state.memory[:] = b"b" * STATE_BYTES
    # Its own page stays as it was, all others follow.
    assert bytes(seen[PAGE_BYTES + 2 : PAGE_BYTES + 5]) == b"axa"
    assert bytes(seen[:PAGE_BYTES]) == b"b" * PAGE_BYTES
    node.state.follow()
    assert bytes(seen[:STATE_BYTES]) == b"b" * STATE_BYTES


# The vector of a model that is large enough for its memory to be shared.
SHARED = SHARED_BYTES_MIN


def test_without_memory_for_a_region_nodes_use_sockets_and_the_user_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1000)
    memory = LocalMemory(Settings(nodes=2))
    assert memory.place_state(SHARED, SHARED) is None
    assert memory.new_share() is None
    assert "Cannot allocate memory" in memory.take_trouble()
    assert memory.take_trouble() == ""


@pytest.mark.parametrize(("road", "told"), [("auto", False), ("shared", True)])
def test_a_system_without_such_memory_is_named_only_if_it_was_asked_for(
    road: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w5xde.runtime.coordinator.local.memory.HAS_REGIONS", False)
    memory = LocalMemory(Settings(nodes=2, road=road))  # type: ignore[arg-type]
    assert memory.place_state(SHARED, SHARED) is None
    assert memory.new_share() is None
    assert bool(memory.take_trouble()) is told


@pytest.mark.parametrize(
    ("changes", "shares_state", "shares_updates"),
    [
        ({}, True, True),
        ({"mode": "async"}, False, True),
        ({"nodes": 0}, False, False),
        ({"road": "unix"}, False, False),
        ({"road": "tcp"}, False, False),
    ],
)
def test_which_memory_is_shared(changes: dict[str, object], shares_state: bool, shares_updates: bool) -> None:
    memory = LocalMemory(Settings(**{"nodes": 2, **changes}))  # type: ignore[arg-type]
    assert (memory.place_state(SHARED, SHARED) is not None) is shares_state
    assert (memory.new_share() is not None) is shares_updates


def test_small_models_share_nothing() -> None:
    memory = LocalMemory(Settings(nodes=2))
    assert memory.place_state(SHARED - 1, 2 * SHARED) is None
    assert memory.new_share() is None
