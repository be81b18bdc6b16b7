"""Sends the code of the job to nodes that ask for it, once they have shown a ticket or credential.

A connection that asks gets one answer, and is closed. Decides nothing about who is admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from w5xde.learn.job.code.offer import JobOffer
from w5xde.messages import Message, Refuse

NO_CODE = "W5-286"
# How long a node may take to receive the code: the most that is sent, at half a megabit a second.
OFFER_SECONDS = 60.0
# More than ever ask at a time: small code is gone at once. A slow node takes memory while it receives.
OFFERS_AT_A_TIME_MAX = 32
# A line of the log for each of so many addresses; who asks again is not news.
ADDRESSES_LOGGED_MAX = 1000


class AskingLink(Protocol):
    """The connection of a node that asks."""

    def send(
        self,
        message: Message,
        pieces: Sequence[bytes | bytearray | memoryview] = (),
        sent: Callable[[], None] | None = None,
    ) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...


class CodeOffers:
    """The code of one run, and the nodes that it is being sent to."""

    def __init__(self, offer: JobOffer | None = None) -> None:
        self._offer = offer or JobOffer()
        code = self._offer.code
        self._message = self._offer.message() if code is not None else None
        # One copy for all nodes.
        self._body = code.body if code is not None else b""
        self._under_way = 0
        self._addresses: set[str] = set()

    def send(self, link: AskingLink) -> Refuse | None:
        """Send the code and close the connection; returns a refusal if that cannot be done now."""
        if self._message is None:
            what = f"the coordinator sends no code: {self._offer.reason}"
            fix = "copy the job to this machine, and name it:  w5xde join TICKET JOB"
            return Refuse(NO_CODE, what, fix=fix)
        if self._under_way >= OFFERS_AT_A_TIME_MAX:
            what = f"the coordinator is sending its code to {self._under_way} nodes, and to no more at a time"
            return Refuse(NO_CODE, what, fix="try again in a minute, or name a copy of the job")
        loop = asyncio.get_running_loop()
        late = loop.call_later(OFFER_SECONDS, link.abort)
        self._under_way += 1

        def sent() -> None:
            self._under_way -= 1
            late.cancel()
            # Not at once: the connection may be in the middle of its own writing.
            loop.call_soon(link.close)

        link.send(self._message, [self._body], sent)
        return None

    def news(self, address: str) -> str:
        """A line for the log if the code goes to this address for the first time, else an empty text."""
        if address in self._addresses or len(self._addresses) >= ADDRESSES_LOGGED_MAX:
            return ""
        self._addresses.add(address)
        return f"{address} was sent the code of the job (sha256 {self._offer.sha256[:16]}…)"
