"""The page in a real browser: what is seen, what is asked of whom, and that the stream goes on."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.browser.chromium import Browser, chromium
from tests.page.folders import add_rows, hold, make_run, node, row
from tests.page.serving import page
from tests.processes import wait_until
from tests.sockets import free_port
from w5xde.page.report import report
from w5xde.runs import STATE_VARIABLE

WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        found.look(1280)
        yield found


@pytest.fixture(autouse=True)
def no_complaints(browser: Browser) -> Iterator[None]:
    browser.complaints()
    browser.requests()
    yield
    browser.open("about:blank")


def test_a_finished_run_is_seen_and_nothing_is_asked_of_others(browser: Browser, tmp_path: Path) -> None:
    with page(make_run(tmp_path)) as visitor:
        browser.open(visitor.url)
        browser.wait_for_chart()
        browser.wait_for("Nothing: 360 steps, 0 lost", "#q4")
        browser.wait_for("gpu-box", "#q3 tbody")
        assert browser.text("h1") == "fixed"
        assert "done" in browser.text("header")
        # The code is spent, and is in no history.
        assert browser.run("return location.href") == f"http://127.0.0.1:{visitor.port}/"
        origins = {url.partition("/#")[0] for url in browser.requests() if not url.startswith("data:")}
        assert all(
            url.startswith(f"http://127.0.0.1:{visitor.port}/") or "#" in url for url in browser.requests()
        )
        assert origins
        assert browser.complaints() == []


def test_text_of_nodes_and_events_stays_text(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    name = "<img src=x onerror=document.title='owned'>"
    add_rows(folder, row(121, (name,), node_facts={name: node(name, 30.0, codec_reason="<b>x</b>")}))
    with page(folder) as visitor:
        browser.open(visitor.url)
        browser.wait_for(name, "#q3 tbody")
        browser.wait_for("old-lap <img src=x onerror=alert(1)> left", "#events")
        assert browser.run("return document.querySelectorAll('img, b.x, iframe, object').length") == 0
        assert "owned" not in browser.run("return document.title")
        assert browser.complaints() == []


def test_a_point_comes_within_three_seconds_of_its_row(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=20, is_over=False)
    hold(folder)
    with page(folder) as visitor:
        browser.open(visitor.url)
        browser.wait_for_chart()
        browser.wait_for("step 60 of 480", "header")
        began = time.monotonic()
        add_rows(folder, row(21, time=time.time()))
        browser.wait_for("step 63 of 480", "header")
        assert time.monotonic() - began < 3
        browser.wait_for("step 63", "#q1 .readout")


def test_nodes_come_and_go(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=20, is_over=False)
    hold(folder)
    with page(folder) as visitor:
        browser.open(visitor.url)
        browser.wait_for("pi-5", "#q3 tbody")
        facts = {"late": node("late", 1.0), "pi-5": node("pi-5", 5.0, state="gone")}
        add_rows(folder, row(21, node_facts=facts, time=time.time()))
        browser.wait_for("late", "#q3 tbody")
        browser.wait_for("gone", "#q3 tbody")


def test_the_banner_says_that_there_is_no_news_and_goes_when_there_is(
    browser: Browser, tmp_path: Path
) -> None:
    folder = make_run(tmp_path, rows=60, is_over=False)
    hold(folder)
    with page(folder) as visitor:
        browser.open(visitor.url)
        browser.wait_for("No news for", ".banner")
        browser.wait_for("120 steps survive a crash", ".banner")
        add_rows(folder, row(61, time=time.time() + 60))
        wait_until(lambda: browser.text(".banner") == "", lambda: browser.text(".banner"))


def test_after_the_page_is_killed_and_started_again_there_is_no_gap(browser: Browser, tmp_path: Path) -> None:
    folder, port, state = make_run(tmp_path, rows=20, is_over=False), free_port(), str(tmp_path / "state")
    hold(folder)
    with page(folder, port=port, **{STATE_VARIABLE: state}) as visitor:
        browser.open(visitor.url)
        browser.wait_for("step 60 of 480", "header")
        visitor.process.kill()
        visitor.process.wait()
        browser.wait_for("does not answer", ".banner")
    add_rows(folder, *(row(at) for at in range(21, 31)))
    with page(folder, port=port, **{STATE_VARIABLE: state}):
        browser.wait_for("step 90 of 480", "header")
        browser.run("document.querySelector('#q1 .chart button[aria-label$=\"as a table\"]').click()")
        browser.wait_for("90", "#q1 tbody")
        shown = [int(line.split()[0]) for line in browser.text("#q1 tbody").splitlines() if line.strip()]
        assert shown[:30] == list(range(90, 0, -3))


def test_a_stranger_is_told_how_to_log_in(browser: Browser, tmp_path: Path) -> None:
    with page(make_run(tmp_path)) as visitor:
        browser.open(visitor.url.partition("#")[0])
        browser.wait_for("not logged in", ".banner")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_it_fits_and_can_be_read(browser: Browser, tmp_path: Path, width: int, is_dark: bool) -> None:
    browser.look(width, is_dark=is_dark)
    try:
        with page(make_run(tmp_path)) as visitor:
            browser.open(visitor.url)
            browser.wait_for_chart()
            browser.wait_for("gpu-box", "#q3 tbody")
            assert browser.run("return document.documentElement.scrollWidth") == width
            picture = Image.open(io.BytesIO(browser.screenshot())).convert("L")
            dark = sum(value < 128 for value in picture.resize((64, 64)).tobytes()) > 64 * 32
            assert dark is is_dark
            assert browser.complaints() == []
    finally:
        browser.look(1280)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_dark", [False, True])
def test_axe_finds_nothing_serious(browser: Browser, tmp_path: Path, width: int, is_dark: bool) -> None:
    browser.look(width, is_dark=is_dark)
    folders = [make_run(tmp_path, name) for name in ("monday", "tuesday")]
    add_rows(folders[0], row(121, tuple(f"node-{number}" for number in range(12))))
    try:
        with page(*folders) as visitor:
            browser.open(visitor.url)
            browser.wait_for("node-11", "#q3 tbody")
            browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
            browser.run(
                "for (const each of document.querySelectorAll('[aria-label$=\"as a table\"]')) each.click()"
            )
            serious = [each for each in browser.findings() if each[0] in ("serious", "critical")]
            assert serious == []
    finally:
        browser.look(1280)


def test_it_can_be_used_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    add_rows(folder, row(121, tuple(f"node-{number}" for number in range(12))))
    with page(folder) as visitor:
        browser.open(visitor.url)
        browser.wait_for("node-11", "#q3 tbody")
        for number in "1234":
            browser.press(number)
            assert browser.run("return document.activeElement.id") == f"q{number}"
        browser.press("/")
        assert browser.run("return document.activeElement.id") == "filter"
        unnamed = (
            "return [...document.querySelectorAll('button, input')].filter((each) => !each.innerText.trim()"
        )
        unnamed += (
            " && !each.getAttribute('aria-label') && !each.labels?.length).map((each) => each.outerHTML)"
        )
        assert browser.run(unnamed) == []


def test_the_chain_of_a_batch_is_shown(browser: Browser, tmp_path: Path) -> None:
    with page(make_run(tmp_path)) as visitor:
        browser.open(visitor.url)
        browser.wait_for("trace it", "#life")
        browser.run(
            "document.getElementById('epoch').value = 0; document.getElementById('batch').value = 1;"
            "document.querySelector('#life form').requestSubmit()"
        )
        browser.wait_for("expired at pi-5 (no answer for 7 s)", ".chain")
        browser.wait_for("answered by gpu-box, and applied in step 0", ".chain")
        browser.wait_for("in the checkpoint of 120 steps", ".chain")


def test_runs_with_the_same_weights_have_the_badge(browser: Browser, tmp_path: Path) -> None:
    folders = [make_run(tmp_path, name) for name in ("monday", "tuesday")]
    with page(*folders) as visitor:
        browser.open(visitor.url)
        browser.wait_for("same bits: all 2 runs", "#compare .badge")
    manifest = json.loads((folders[1] / "manifest.json").read_text())
    manifest["settings"]["seed"] = 1
    manifest["result"]["weights_sha256"] = "cd" * 32
    (folders[1] / "manifest.json").write_text(json.dumps(manifest))
    with page(*folders) as visitor:
        browser.open(visitor.url)
        browser.wait_for("other bits: they differ in seed", "#compare .badge")


def test_a_report_opens_from_disk(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_bytes(report([make_run(tmp_path)], time.time()))
    browser.requests()
    browser.open(file.as_uri())
    browser.wait_for_chart()
    browser.wait_for("Nothing: 360 steps", "#q4")
    browser.wait_for("gpu-box", "#q3 tbody")
    assert {url.partition(":")[0] for url in browser.requests()} <= {"file", "data"}
    assert browser.complaints() == []
