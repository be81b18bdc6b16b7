"""A real browser without a window: Debian's Chromium, driven by selenium."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.processes import ROOT, wait_until

# `make browser` puts it there.
AXE = ROOT / ".venv" / "axe" / "package" / "axe.min.js"


class Browser:
    """One page of a browser."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def look(self, width: int, *, is_dark: bool = False) -> None:
        """Be so wide, and light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        self._driver.get(url)

    def run(self, script: str) -> Any:
        return self._driver.execute_script(script)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"return document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, text: str, selector: str = "body") -> None:
        wait_until(lambda: text in self.text(selector), lambda: f"no {text!r} in {self.text(selector)!r}")

    def wait_for_chart(self) -> None:
        wait_until(
            lambda: bool(self.run("return document.querySelector('#q1 .plot canvas') !== null")),
            lambda: f"no chart: {self.text()!r}, {self.complaints()}",
        )

    def press(self, key: str) -> None:
        event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}})"
        self.run(f"document.body.dispatchEvent({event})")

    def complaints(self) -> list[str]:
        """What the browser logged: errors of scripts, and all that the policy forbade."""
        return [entry["message"] for entry in self._driver.get_log("browser") if entry["level"] != "INFO"]

    def requests(self) -> set[str]:
        """The addresses that were asked."""
        entries = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        return {
            entry["params"]["request"]["url"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        }

    def findings(self) -> list[tuple[str, str, list[str]]]:
        """What axe finds wrong for people who do not see or use a mouse: (impact, rule, places)."""
        self.run(AXE.read_text(encoding="utf-8"))
        script = """const done = arguments[0];
            axe.run().then((found) => done(found.violations.map((each) =>
                [each.impact, each.id, each.nodes.map((node) => node.target.join(" "))])));"""
        return [tuple(each) for each in self._driver.execute_async_script(script)]

    def screenshot(self) -> bytes:
        """The whole page as a PNG, also what one would have to scroll to."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self._driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip}
        )
        return base64.b64decode(taken["data"])


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser; it ends with the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    # As root there is no sandbox; small /dev/shm of containers makes pages crash.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(executable_path=shutil.which("chromedriver") or "chromedriver")
    driver = webdriver.Chrome(service=service, options=options)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
