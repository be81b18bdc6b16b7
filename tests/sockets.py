"""Ports of this machine that behave as a test asks, and tickets that lead to them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from w5xde.ticket import Secret, Ticket


def clear_ticket(address: str) -> str:
    """Return a clear-text ticket to an address of this machine; what listens there need not know it."""
    host, _, port = address.rpartition(":")
    return Ticket(((host, int(port)),), b"", bytes(8), Secret(bytes(16)), is_clear=True).to_text()


def free_port() -> int:
    """Return a port on which nothing listens; another process may take it at any time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def closed_port() -> Iterator[str]:
    """Yield the address of a port that refuses connections, and that no other process can take meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Listen, and call the function with each connection in turn; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def full_backlog() -> Iterator[str]:
    """Yield the address of a port whose queue of connections is full: the system drops the next one."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        yield f"127.0.0.1:{place[1]}"
