"""Large buffers come back by themselves, and are used again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from w5xde.learn.model.buffers import Buffers
from w5xde.learn.model.route import LARGE_BYTES_MIN


def test_memory_is_used_again_once_nobody_holds_a_view_of_it() -> None:
    buffers = Buffers()
    view = buffers.take(LARGE_BYTES_MIN)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    place = tensor.data_ptr()
    del view
    other = torch.frombuffer(buffers.take(LARGE_BYTES_MIN), dtype=torch.uint8)
    assert other.data_ptr() != place
    del tensor
    assert torch.frombuffer(buffers.take(LARGE_BYTES_MIN), dtype=torch.uint8).data_ptr() == place


def test_memory_that_is_a_little_larger_does_and_comes_back_whole() -> None:
    buffers = Buffers()
    place = torch.frombuffer(buffers.take(2 * LARGE_BYTES_MIN), dtype=torch.uint8).data_ptr()
    smaller = torch.frombuffer(buffers.take(2 * LARGE_BYTES_MIN - 1000), dtype=torch.uint8)
    assert (smaller.data_ptr(), smaller.numel()) == (place, 2 * LARGE_BYTES_MIN - 1000)
    del smaller
    assert torch.frombuffer(buffers.take(2 * LARGE_BYTES_MIN), dtype=torch.uint8).data_ptr() == place


def test_memory_that_fits_nothing_any_more_is_let_go() -> None:
    buffers = Buffers()
    del (lent := [buffers.take(8 * LARGE_BYTES_MIN), buffers.take(8 * LARGE_BYTES_MIN)])[:]
    assert len(buffers._spare) == 2
    lent.append(buffers.take(LARGE_BYTES_MIN))
    assert len(buffers._spare) == 0


@pytest.fixture
def busy_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_buffers_are_given_back_by_any_thread(busy_threads: None) -> None:
    buffers = Buffers()
    held: list[Any] = []
    is_over = False

    def drop() -> None:
        while not is_over:
            held.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for number in range(3000):
            held.insert(number, buffers.take(LARGE_BYTES_MIN))
    finally:
        is_over = True
        thread.join()
