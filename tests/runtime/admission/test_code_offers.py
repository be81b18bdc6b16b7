"""Sending code: one answer for each connection, so many at a time, and none for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.job.code.offer import JobOffer
from w5xde.messages import Offer, Refuse
from w5xde.runtime.admission import code_offers
from w5xde.runtime.admission.code_offers import OFFERS_AT_A_TIME_MAX, CodeOffers

CODE = CodeBundle.of("train.py", {"train.py": b"x = 1\n"})


class SlowLink:
    """A connection whose peer receives when the test says so."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, bytes]] = []
        self.sent: Callable[[], None] = lambda: None
        self.ends: list[str] = []
        self.is_over = asyncio.Event()

    def send(
        self, message: Any, pieces: Sequence[bytes] = (), sent: Callable[[], None] | None = None
    ) -> None:
        self.said.append((message, b"".join(pieces)))
        self.sent = sent or self.sent

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.sent()
        self.is_over.set()


def test_a_run_without_code_says_why_and_what_to_do():
    answer = CodeOffers(JobOffer(reason="it was started with --ship off")).send(SlowLink())
    assert isinstance(answer, Refuse)
    assert answer.code == "W5-286"
    assert "--ship off" in answer.what
    assert "w5xde join TICKET JOB" in answer.fix


def test_code_goes_out_once_and_then_the_connection_closes():
    async def story() -> None:
        link = SlowLink()
        assert CodeOffers(JobOffer(CODE)).send(link) is None
        [(message, body)] = link.said
        assert isinstance(message, Offer)
        assert CodeBundle.from_offer(message, bytearray(body)) == CODE
        assert link.ends == []
        link.sent()
        await asyncio.sleep(0)
        assert link.ends == ["closed"]

    asyncio.run(story())


def test_only_so_many_are_sent_it_at_a_time():
    async def story() -> None:
        offers = CodeOffers(JobOffer(CODE))
        links = [SlowLink() for _ in range(OFFERS_AT_A_TIME_MAX)]
        assert [offers.send(link) for link in links] == [None] * OFFERS_AT_A_TIME_MAX
        refused = offers.send(SlowLink())
        assert isinstance(refused, Refuse)
        assert "try again in a minute" in refused.fix
        links[0].sent()
        assert offers.send(SlowLink()) is None

    asyncio.run(story())


def test_a_node_that_does_not_receive_is_cut_off_and_its_place_is_free(monkeypatch):
    monkeypatch.setattr(code_offers, "OFFER_SECONDS", 0.01)
    monkeypatch.setattr(code_offers, "OFFERS_AT_A_TIME_MAX", 1)

    async def story() -> None:
        offers = CodeOffers(JobOffer(CODE))
        link = SlowLink()
        offers.send(link)
        assert offers.send(SlowLink()) is not None
        await link.is_over.wait()
        assert offers.send(SlowLink()) is None

    asyncio.run(story())


def test_one_address_is_news_once():
    offers = CodeOffers(JobOffer(CODE))
    assert CODE.sha256[:16] in offers.news("10.0.0.1")
    assert offers.news("10.0.0.1") == ""
    assert offers.news("10.0.0.2")
