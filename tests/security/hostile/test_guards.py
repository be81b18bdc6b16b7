"""How a door is guarded: the user's own certificates, clear text that is asked for, and what is bound."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

import w5xde
from tests.processes import HERE, JOBS, HurryOnce, command, coordinator, events, node, ticket_of
from tests.security.net.test_tls import Authority
from tests.security.stranger import Stranger
from w5xde.config import Settings
from w5xde.errors import JoinError, UsageError
from w5xde.messages import Refuse
from w5xde.runtime.admission.gatekeeper import Gatekeeper
from w5xde.runtime.net.listener import ListenAddress, resolve_addresses
from w5xde.ticket import parse

NAME = "localhost"


def test_a_certificate_of_the_users_own_is_checked_by_its_name_authority_and_dates(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "authority"), Authority(tmp_path / "stranger")
    cert, key = (str(each) for each in authority.issue(NAME))
    node_cert, node_key = (str(each) for each in authority.issue("node"))
    given = {"tls_cert": cert, "tls_key": key, "tls_ca": str(authority.file), "advertise": NAME}
    own = {"tls_ca": str(authority.file), "tls_cert": node_cert, "tls_key": node_key}
    with coordinator(tmp_path, **given) as run:
        ticket = dataclasses.replace(run.ticket, addresses=((NAME, run.port),))
        assert ticket.is_pki
        for settings, words in [
            ({**own, "tls_ca": str(stranger.file)}, "could not prove who it is"),
            # The other side wants a certificate, and this node has none: it is told by the end.
            ({"tls_ca": str(authority.file)}, "closed|hung up|CERTIFICATE_REQUIRED"),
        ]:
            with pytest.raises(JoinError, match=words) as caught:
                w5xde.join(ticket, f"{JOBS}:job", wait=0, road="tcp", **settings)
            assert caught.value.code in ("W5-503", "W5-102")
        with node(ticket, node_name="guest", road="tcp", **own) as guest:
            run.wait_until_recorded("guest joined")
            run.settings = {key: value for key, value in run.settings.items() if key not in given}
            run.stop_and_compare(tmp_path)
            assert guest.wait() == 0


@pytest.mark.parametrize("is_mutual", [False, True])
def test_local_nodes_come_over_tcp_to_a_certificate_of_the_users_own(
    is_mutual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for a name that is not theirs: they know the very certificate, and show it if one is wanted."""
    authority = Authority(tmp_path / "authority")
    cert, key = (str(each) for each in authority.issue("trainer.example.org"))
    settings = {"nodes": 2, "steps": 5, "runs": str(tmp_path), "log": "silent"}
    given = {"tls_cert": cert, "tls_key": key, "host": "0.0.0.0", "advertise": "trainer.example.org"}
    given |= {"tls_ca": str(authority.file)} if is_mutual else {}
    # Both nodes must have joined before the run is over.
    monkeypatch.setenv("TEST_HURRY_FILE", str(tmp_path / "hurry"))
    both = HurryOnce(tmp_path / "hurry", "local-1", "local-2")
    result = w5xde.train(f"{JOBS}:slow", name="secured", road="tcp", callbacks=[both], **given, **settings)
    plain = w5xde.train(f"{JOBS}:slow", name="plain", **settings)
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    told = [record for record in events(tmp_path / "secured") if record["kind"] == "joined"]
    assert {record["node"] for record in told} == {"local-1", "local-2"}


def test_an_expired_certificate_of_the_users_own_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key = (str(each) for each in authority.issue(NAME, days=-1))
    with coordinator(tmp_path, tls_cert=cert, tls_key=key, advertise=NAME) as run:
        ticket = dataclasses.replace(run.ticket, addresses=((NAME, run.port),))
        with pytest.raises(JoinError, match="expired") as caught:
            w5xde.join(ticket, f"{JOBS}:job", wait=0, road="tcp", tls_ca=str(authority.file))
        assert caught.value.code == "W5-503"


def test_clear_text_is_asked_for_told_at_both_ends_and_still_authenticated(tmp_path: Path) -> None:
    options = ["--host", "0.0.0.0", "--insecure", "--port", "0", "--epochs", "3", "--runs", str(tmp_path)]
    with command("serve", f"{JOBS}:job", *options) as served:
        served.wait_for("INSECURE: this run is in clear text")
        text = ticket_of(served)
        ticket = parse(text)
        assert ticket.is_clear
        with Stranger(ticket) as stranger:
            stranger.greet(ticket=ticket.id + bytes(16))
            answer = stranger.hear()
            assert isinstance(answer, Refuse)
            assert answer.code == "W5-113"
        with command("join", text, f"{JOBS}:job") as guest:
            assert guest.wait() == 0, guest.text
        if ticket.addresses[0][0] != HERE:
            assert "INSECURE: this run is in clear text" in guest.text
        assert served.wait() == 0


@pytest.mark.parametrize(
    ("hosts", "insecure", "is_clear", "is_exposed"),
    [
        (["127.0.0.1"], False, True, False),
        (["127.0.0.1", "::1"], False, True, False),
        (["0.0.0.0"], False, False, False),
        (["::"], False, False, False),
        (["127.0.0.1", "192.0.2.2"], False, False, False),
        (["0.0.0.0"], True, True, True),
        (["127.0.0.1"], True, True, False),
    ],
)
def test_only_what_stays_on_this_machine_is_in_clear_text_by_itself(
    hosts: list[str], insecure: bool, is_clear: bool, is_exposed: bool, tmp_path: Path
) -> None:
    gatekeeper = Gatekeeper(tmp_path, "0123456789abcdef", Settings(insecure=insecure))
    context = gatekeeper.guard([ListenAddress(2, host) for host in hosts])
    assert (context is None, gatekeeper.is_exposed) == (is_clear, is_exposed)
    gatekeeper.close()


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for settings in (Settings(tls_ca="ca.pem"), Settings(insecure=True, tls_cert="a", tls_key="b")):
        with pytest.raises(UsageError) as caught:
            Gatekeeper(tmp_path, "0123456789abcdef", settings).guard([ListenAddress(2, "0.0.0.0")])
        assert caught.value.code == "W5-505"


def test_a_name_means_the_addresses_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a door is this machine's alone is asked of addresses: a name says what somebody wrote down."""

    async def found(host: str) -> list[ListenAddress]:
        return await resolve_addresses(host, 0)

    assert asyncio.run(found("127.0.0.1")) == [ListenAddress(2, "127.0.0.1")]
    assert not asyncio.run(found("auto"))[0].is_loopback
    assert all(place.is_loopback for place in asyncio.run(found("localhost")))
