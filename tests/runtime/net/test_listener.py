"""The door: whoever is let in, is turned away or comes too late, no socket is left behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.runtime.net.listener import Listener, resolve_addresses


def test_one_who_comes_at_the_last_moment_is_closed_with_the_door() -> None:
    async def visit() -> None:
        made: list[object] = []
        door = Listener(made.append, ConnectionLimits())  # type: ignore[arg-type]
        door.listen(await resolve_addresses("127.0.0.1", 0), "127.0.0.1", 0, road="tcp")
        with socket.create_connection(door.address) as guest:
            guest.settimeout(5)
            # In the second turn of the loop it is accepted; in the third it would be welcomed.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            door.stop_accepting()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            door.close()
            assert guest.recv(1) == b""
        assert made == []

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        asyncio.run(visit())
        gc.collect()
