"""Which requests the page refuses, over real HTTP."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.page.folders import make_run
from tests.page.serving import Visitor, opened, page
from w5xde.page.assets import SERVED
from w5xde.page.guard import CSP
from w5xde.runs import STATE_VARIABLE


@pytest.fixture(scope="module")
def visitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visitor]:
    with opened(make_run(tmp_path_factory.mktemp("runs"))) as found:
        yield found


def test_the_link_leads_to_this_machine_and_its_code_is_in_the_fragment(visitor: Visitor) -> None:
    parts = urlsplit(visitor.url)
    assert (parts.scheme, parts.hostname, parts.path, parts.query) == ("http", "127.0.0.1", "/", "")
    assert parts.fragment.startswith("c=")


def test_a_code_works_once(visitor: Visitor) -> None:
    assert visitor.role == "operator"
    assert visitor.ask("/api/login", "POST", visitor.code).status == 401


@pytest.mark.parametrize("code", ["", "x", "é", "../../etc/passwd"])
def test_a_wrong_code_is_refused(visitor: Visitor, code: str) -> None:
    assert visitor.ask("/api/login", "POST", code).status == 401


def test_a_code_that_never_ends_is_not_read(visitor: Visitor) -> None:
    assert visitor.ask("/api/login", "POST", "x" * 5000).status == 413


@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/0/stream", "/api/runs/0/history", "/api/nothing"])
@pytest.mark.parametrize("token", ["", "Bearer ", "Bearer x", "Basic x"])
def test_a_stranger_without_the_code_sees_nothing_of_the_run(visitor: Visitor, path: str, token: str) -> None:
    stranger = Visitor(visitor.process, visitor.url)
    assert stranger.ask(path, Authorization=token).status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8050", "localhost.evil.example", "", "127.0.0.1.nip.io"]
)
def test_a_foreign_host_is_refused_against_dns_rebinding(visitor: Visitor, host: str) -> None:
    assert visitor.ask("/api/runs", Host=host).status == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_names_of_this_machine_are_answered(visitor: Visitor, host: str) -> None:
    assert visitor.ask("/api/runs", Host=f"{host}:{visitor.port}").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_is_refused(visitor: Visitor, site: str) -> None:
    assert visitor.ask("/api/runs", Sec_Fetch_Site=site).status == 403
    assert visitor.ask("/", Sec_Fetch_Site=site).status == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1"])
def test_another_origin_may_not_post(visitor: Visitor, origin: str) -> None:
    assert visitor.ask("/api/login", "POST", "x", Origin=origin).status == 403


def test_our_own_origin_may_post(visitor: Visitor) -> None:
    own = f"http://127.0.0.1:{visitor.port}"
    assert visitor.ask("/api/login", "POST", "x", Origin=own).status == 401


def test_there_is_nothing_to_change(visitor: Visitor) -> None:
    assert visitor.ask("/api/runs", "POST", "").status == 405
    assert visitor.ask("/api/stop", "POST", "").status == 404


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/nothing", "/api/nothing"])
def test_every_answer_has_the_headers_that_protect_it(visitor: Visitor, path: str) -> None:
    headers = visitor.ask(path).headers
    assert headers["content-security-policy"] == CSP
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "set-cookie" not in headers
    assert "server" not in headers


@pytest.mark.parametrize("site", ["cross-site", None])
def test_refusals_have_them_too(visitor: Visitor, site: str | None) -> None:
    headers = visitor.ask(
        "/api/runs", Host="evil.example", **({"Sec_Fetch_Site": site} if site else {})
    ).headers
    assert headers["content-security-policy"] == CSP


@pytest.mark.parametrize(
    "path",
    [
        "/../manifest.json",
        "/static/../../config.py",
        "/static/%2e%2e/app.py",
        "/vendor/vendor.json",
        "/tickets.json",
    ],
)
def test_no_other_file_is_served(visitor: Visitor, path: str) -> None:
    assert visitor.ask(path).status == 404


def test_the_files_of_the_page_need_no_login(visitor: Visitor) -> None:
    stranger = Visitor(visitor.process, visitor.url)
    assert {stranger.ask(path).status for path in SERVED} == {200}


@pytest.mark.parametrize(
    "path", ["/api/runs/1/stream", "/api/runs/99/history", "/api/runs/-1/history", "/api/runs/7/batches/0/0"]
)
def test_a_run_that_is_not_shown_is_not_found(visitor: Visitor, path: str) -> None:
    assert visitor.ask(path).status == 404


def test_a_viewer_may_look_and_may_not_post(tmp_path: Path) -> None:
    with opened(make_run(tmp_path), flags=("--read-only",)) as viewer:
        assert viewer.role == "viewer"
        assert viewer.ask("/api/runs").status == 200
        assert viewer.ask("/api/runs", "POST", "").status == 403
        assert viewer.ask("/api/stop", "POST", "").status == 403
        assert viewer.ask("/api/stop", "DELETE").status == 403


def test_a_token_counts_for_its_own_runs_alone(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    mine, other = make_run(tmp_path, "mine"), make_run(tmp_path, "other", id="f" * 16)
    with opened(mine, **{STATE_VARIABLE: state}) as first:
        token = first.token
    with page(mine, **{STATE_VARIABLE: state}) as again:
        again.token = token
        assert again.ask("/api/runs").json == {"runs": ["mine"]}
    with page(other, **{STATE_VARIABLE: state}) as stranger:
        stranger.token = token
        assert stranger.ask("/api/runs").status == 401
    [kept] = (tmp_path / "state" / "page").glob("sessions.json")
    assert kept.stat().st_mode & 0o077 == 0
    assert token not in kept.read_text()


def test_for_other_machines_there_is_tls_with_a_key_of_its_own(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with opened(make_run(tmp_path), flags=("--host", "0.0.0.0"), **{STATE_VARIABLE: str(state)}) as visitor:
        assert visitor.url.startswith("https://")
        assert visitor.ask("/api/runs").status == 200
        pem = ssl.get_server_certificate(("127.0.0.1", visitor.port))
        key = state / "page" / "page.pem"
        assert pem.strip() in key.read_text()
        assert key.stat().st_mode & 0o077 == 0
        assert not (state / "runs").exists(), "the keys of runs are not touched"
        plain = HTTPConnection("127.0.0.1", visitor.port, timeout=30)
        plain.request("GET", "/")
        with pytest.raises(OSError):  # noqa: PT011 - a reset or an end, as the system likes
            plain.getresponse()
        plain.close()
