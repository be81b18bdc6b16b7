"""A slow link between two processes of one machine: a relay that forwards bytes at a limited rate.

Each direction of each connection has its own token bucket. The relay reads only what it may forward, so a
sender that is too fast finds its socket full, as on a real link. Knows nothing of the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from w5xde.bench.measure.processes import Line

# Bytes that may pass at once after a pause: about the buffer of a switch or a modem. Never less than passes
# while a process waits for a core, or the link would be slower than its rate.
BURST_BYTES = 64 * 1024
BURST_SECONDS = 0.005
# Bytes are forwarded in parts of a burst: few enough to be cheap, small enough to flow.
BURST_PARTS = 8
# Small, so that few bytes wait inside the relay.
RECEIVE_BUFFER_BYTES = 256 * 1024


class Bucket:
    """A token bucket: the bytes that may pass. Knows no clock: callers pass `now`."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.size = max(BURST_BYTES, int(BURST_SECONDS * bytes_per_second))
        self._level = float(self.size)
        self._at = now

    def free(self, now: float) -> int:
        """Bytes that may pass now."""
        self._level = min(self.size, self._level + (now - self._at) * self.bytes_per_second)
        self._at = now
        return int(self._level)

    def wait_seconds(self, now: float) -> float:
        """Seconds until a part of a burst may pass; 0 if it may now."""
        return max(0.0, (self.size // BURST_PARTS - self.free(now)) / self.bytes_per_second)

    def take(self, count: int) -> None:
        """Count bytes that have passed."""
        self._level -= count


def open_listener() -> socket.socket:
    """The socket on which nodes connect to the relay."""
    listener = socket.create_server(("127.0.0.1", 0))
    # Connections inherit it; once they are open, their windows cannot be kept small.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


def be_relay(line: Line, listener: socket.socket, bytes_per_second: float) -> None:
    """The process of a relay: gets the address of the coordinator, and forwards until it is killed."""
    host, port = line.hear()
    asyncio.run(_accept(listener, (host, port), bytes_per_second))


async def _accept(listener: socket.socket, address: tuple[str, int], bytes_per_second: float) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as links:
        while True:
            near, _ = await loop.sock_accept(listener)
            links.create_task(_link(near, address, bytes_per_second))


async def _link(near: socket.socket, address: tuple[str, int], bytes_per_second: float) -> None:
    far = socket.socket()
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    with near, far:
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(far, address)
        await asyncio.gather(
            forward(near, far, bytes_per_second),
            forward(far, near, bytes_per_second),
        )


async def forward(source: socket.socket, target: socket.socket, bytes_per_second: float) -> None:
    """Forward one direction until either side closes."""
    loop = asyncio.get_running_loop()
    bucket = Bucket(bytes_per_second, loop.time())
    buffer = memoryview(bytearray(bucket.size))
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(bucket.wait_seconds(loop.time()))
            count = await loop.sock_recv_into(source, buffer[: bucket.free(loop.time())])
            if not count:
                break
            # Fill the bucket for the time spent waiting for these bytes.
            bucket.free(loop.time())
            bucket.take(count)
            await loop.sock_sendall(target, buffer[:count])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
