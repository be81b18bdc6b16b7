"""The page beside real coordinators that are killed, seen in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

from tests.browser.chromium import chromium
from tests.page.serving import page
from tests.processes import JOBS, command, wait_until

STEPS = "return [...document.querySelectorAll('#q1 tbody tr')].map((each) => each.cells[0].innerText)"


def newest(folder: Path) -> int:
    lines = (
        (folder / "metrics.jsonl").read_bytes().splitlines() if (folder / "metrics.jsonl").exists() else []
    )
    return int(json.loads(lines[-1])["step"]) if lines else 0


def test_a_killed_coordinator_is_noticed_and_its_next_life_is_drawn_without_a_gap(tmp_path: Path) -> None:
    flags = ("--nodes", "1", "--checkpoint-every", "1s", "--steps", "10000000")
    folder = tmp_path / "runs" / "killed"
    with chromium() as browser:
        browser.look(1280)
        with command("train", f"{JOBS}:job", *flags, "--name", "killed", cwd=tmp_path) as train:
            wait_until(lambda: newest(folder) > 10, lambda: train.text)
            with page(folder) as visitor:
                browser.open(visitor.url)
                browser.wait_for("training", "header")
                browser.wait_for_chart()
                browser.wait_for("survive a crash", "#q4 .sentence")
                train.kill_with_children()
                train.wait()
                browser.wait_for("No news for", ".banner")
                browser.wait_for("its coordinator is gone", ".banner")
                browser.wait_for("gone", "header .pill")
                with command("train", "--resume", "killed", cwd=tmp_path) as again:
                    wait_until(
                        lambda: json.loads((folder / "manifest.json").read_text())["life"] == 2,
                        lambda: again.text,
                    )
                    browser.wait_for("training", "header .pill")
                    wait_until(lambda: browser.text(".banner") == "", lambda: browser.text(".banner"))
                    browser.wait_for("life 2", "#q4")
                    browser.run("document.querySelector('#q1 button[aria-label$=\"as a table\"]').click()")
                    wait_until(lambda: len(browser.run(STEPS)) > 5, lambda: browser.text("#q1"))
                    steps = [int(each.replace(",", "")) for each in browser.run(STEPS)]
                    losses = [step for step in steps if step]
                    assert losses == sorted(losses, reverse=True)
                    assert browser.complaints() == []
