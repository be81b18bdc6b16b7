"""The gatekeeper: which processes of a local node it admits, and whose memory it keeps."""

from __future__ import annotations

import socket
import weakref
from pathlib import Path

from w5xde.config import Settings
from w5xde.messages import PROTOCOL_VERSION, Hello
from w5xde.runtime.admission.gatekeeper import Gatekeeper
from w5xde.runtime.net.listener import ListenAddress
from w5xde.runtime.system.shared_memory import PAGE_BYTES, LocalShare, UpdateRegion
from w5xde.ticket import Ticket


def opened(folder: Path) -> Gatekeeper:
    gatekeeper = Gatekeeper(folder, "0" * 16, Settings())
    gatekeeper.guard([ListenAddress(socket.AF_INET, "127.0.0.1")])
    return gatekeeper


def hello(ticket: Ticket) -> Hello:
    return Hello(PROTOCOL_VERSION, "0", "node-1", ticket=ticket.id + ticket.secret.reveal())


def shared() -> LocalShare:
    return LocalShare(UpdateRegion(PAGE_BYTES), None)


def test_the_memory_of_a_dead_process_is_free_when_the_next_one_of_its_name_comes(tmp_path: Path) -> None:
    gatekeeper = opened(tmp_path)
    first = shared()
    gone = weakref.ref(first)
    earlier = gatekeeper.local_ticket("127.0.0.1", 5, "node-1", first)
    other = gatekeeper.local_ticket("127.0.0.1", 5, "node-2", shared())
    unnamed = gatekeeper.local_ticket("127.0.0.1", 5)
    del first
    later = gatekeeper.local_ticket("127.0.0.1", 5, "node-1", shared())
    assert gatekeeper.local_node(hello(later)) is not None
    assert gone() is None
    assert gatekeeper.local_node(hello(earlier)) is None
    for ticket in (later, other, unnamed):
        assert gatekeeper.local_node(hello(ticket)) is not None


def test_a_process_that_comes_back_keeps_no_later_one_out(tmp_path: Path) -> None:
    gatekeeper = opened(tmp_path)
    earlier, later = (gatekeeper.local_ticket("127.0.0.1", 5, "node-1", shared()) for _ in range(2))
    assert gatekeeper.local_node(hello(earlier)) is not None
    assert gatekeeper.local_node(hello(later)) is not None


def test_an_unknown_secret_changes_nothing(tmp_path: Path) -> None:
    gatekeeper = opened(tmp_path)
    earlier, later = (gatekeeper.local_ticket("127.0.0.1", 5, "node-1", shared()) for _ in range(2))
    guessed = Hello(PROTOCOL_VERSION, "0", "node-1", ticket=later.id + bytes(16))
    assert gatekeeper.local_node(guessed) is None
    assert gatekeeper.local_node(hello(earlier)) is not None
