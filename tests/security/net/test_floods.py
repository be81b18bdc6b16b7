"""Strangers who come by the hundred: who has joined goes on, and who may join still does.

From this machine's own addresses, each of which counts for itself, so that limits act as they would on
others. How fast all that is, is no test's to say: `python -m tests.security.floods` measures it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.processes import HERE, Coordinator, coordinator, wait_until
from tests.security.floods import (
    LORIS,
    dial_crowd,
    drip,
    knock,
    many_addresses,
    one_address,
    open_now,
)
from tests.security.stranger import Stranger
from w5xde.control.pool import connection_limits as limits
from w5xde.control.pool import patience
from w5xde.messages import Refuse, Welcome
from w5xde.runtime.system.machine import own_addresses

KNOCKS = 2000


def let_in(run: Coordinator, source: str) -> bool:
    """Whether an honest greeting from a quiet address is answered with a welcome."""
    try:
        with Stranger(run.ticket, source=source) as honest:
            honest.greet(name="honest", looks=True)
            return isinstance(honest.hear(), Welcome)
    except OSError:
        return False


def test_those_who_say_nothing_or_little_are_cut_and_others_join_meanwhile(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        run.wait_for_step(2)
        process = psutil.Process(run.process.pid)
        before = process.memory_info().rss
        socks = dial_crowd(run.port, one_address())
        wait_until(lambda: let_in(run, "127.0.0.8"), lambda: "nobody was let in")
        kept = open_now(socks)
        assert len(kept) <= limits.UNAUTHENTICATED_HERE_MAX
        # Not over a file or two of metrics: what those at the door may take.
        assert process.memory_info().rss - before < 30 * 2**20
        run.wait_for_step(run.step() + 2)

        def are_gone() -> bool:
            drip(socks[:LORIS])
            return not open_now(kept)

        wait_until(are_gone, lambda: f"{len(open_now(kept))} are still there")
        for sock in socks:
            sock.close()
        run.wait_until_recorded("127.0.0.7 was turned away: too many")
        assert run.ledger_text().count("127.0.0.7 was turned away") <= 4, "not a line for each of them"
        run.stop_and_compare(tmp_path)


def test_a_crowd_from_many_addresses_makes_room_for_who_comes_after_it(tmp_path: Path) -> None:
    with coordinator(tmp_path) as run:
        run.wait_for_step(2)

        def is_let_in_at_their_expense() -> bool:
            # Again, should they all have been cut before the honest one came.
            with contextlib.ExitStack() as crowd:
                for sock in dial_crowd(run.port, many_addresses()):
                    crowd.enter_context(sock)
                wait_until(lambda: let_in(run, "127.0.0.8"), lambda: "nobody was let in")
            return "and others wait at the door" in run.ledger_text()

        wait_until(is_let_in_at_their_expense, lambda: "it was let in only when they were gone")
        run.wait_for_step(run.step() + 2)
        run.stop_and_compare(tmp_path)


@pytest.mark.parametrize("sources", [one_address, many_addresses])
def test_a_flood_of_connections_and_handshakes_does_not_stop_those_who_work(
    tmp_path: Path, sources: Callable[[], list[str]]
) -> None:
    with coordinator(tmp_path) as run:
        run.wait_for_step(2)
        before, addresses = run.step(), sources()
        for number in range(KNOCKS):
            knock(run.port, addresses[number % len(addresses)])
        wait_until(lambda: let_in(run, "127.0.0.10"), lambda: "nobody was let in")
        run.wait_until_recorded("too many handshakes a second")
        run.wait_for_step(before + 2)
        run.stop_and_compare(tmp_path)


def test_a_node_that_sends_or_takes_hardly_anything_is_cut_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte a second inside a frame; the others go on as if it were not there."""
    # The coordinator is forked from this process.
    monkeypatch.setattr(patience, "SLOW_SECONDS", 3.0)
    with coordinator(tmp_path) as run:
        run.wait_for_step(2)
        with Stranger(run.ticket) as slow:
            slow.greet(name="snail")
            slow.get_ready()
            slow.sock.sendall(b"W5\x01\x00\xff\x00\x00\x00")

            slow.sock.settimeout(0.5)

            def is_cut() -> bool:
                """Half a second and a byte later, or at once if the other side hangs up."""
                try:
                    slow.sock.sendall(b"\x00")
                    return not slow.sock.recv(65536)
                except TimeoutError:
                    return False
                except OSError:
                    return True

            wait_until(is_cut, lambda: "the snail is still there")
        run.wait_until_recorded("snail left")
        assert "snail left (it sent less than 8192 bytes a second for 3 s)" in run.ledger_text()
        run.stop_and_compare(tmp_path)


def test_who_guesses_secrets_is_not_heard_for_a_while(tmp_path: Path) -> None:
    """From an address that is not this machine's loopback, if it has one."""
    [own, *_] = own_addresses()
    with coordinator(tmp_path) as run:
        codes = []
        for _ in range(limits.FAILURES_MAX + 3):
            try:
                with Stranger(run.ticket, host=own) as guess:
                    guess.greet(ticket=bytes(24))
                    answer = guess.hear()
                    codes.append(answer.code if isinstance(answer, Refuse) else None)
            except OSError:
                codes.append(None)
        heard = limits.FAILURES_MAX if own != HERE else len(codes)
        assert codes == ["W5-113"] * heard + [None] * (len(codes) - heard)
        run.stop_and_compare(tmp_path)
