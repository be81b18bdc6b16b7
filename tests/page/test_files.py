"""The files of the page: vendored ones are those that were published, none makes markup, all are small."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from tests.page.folders import RECORDS, make_run, write_ledger
from w5xde.page.assets import FOLDER, ICON, INDEX, SCRIPTS, SERVED, STYLES, content
from w5xde.page.report import report

WEIGHT_MAX = 130_000
SCRIPT_LINES_MAX = 300
OWN = [name for name in SCRIPTS if name.startswith("static/")]
# What turns text into markup or code.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bFunction\b|createContextualFragment"
    r"|setHTML|srcdoc|javascript:|DOMParser"
)


def test_what_is_vendored_is_what_was_published() -> None:
    facts = json.loads((FOLDER / "vendor/vendor.json").read_text())
    files = {path.name for path in (FOLDER / "vendor").iterdir()} - {"vendor.json"}
    assert files == set(facts["files"])
    for name, fact in facts["files"].items():
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == fact["sha256"], name
    assert facts["version"].encode() in content("vendor/uPlot.iife.min.js")[:200]


def test_the_page_weighs_at_most_130_kb_before_compression() -> None:
    assert sum(len(content(name)) for name in {*SERVED.values()}) <= WEIGHT_MAX


@pytest.mark.parametrize("name", [*OWN, "vendor/uPlot.iife.min.js"])
def test_no_script_turns_text_into_markup_or_code(name: str) -> None:
    assert FORBIDDEN.findall(content(name).decode()) == []


def test_the_rule_sees_what_it_is_for() -> None:
    for bad in ("a.innerHTML = b", "eval(x)", "new Function(x)", "a.insertAdjacentHTML('x', y)"):
        assert FORBIDDEN.search(bad)


@pytest.mark.parametrize("name", OWN)
def test_scripts_are_plain_and_short(name: str) -> None:
    text = content(name).decode()
    assert text.startswith("/* ")
    assert '"use strict";' in text
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)
    assert len(text.splitlines()) <= SCRIPT_LINES_MAX


@pytest.mark.parametrize("name", [INDEX, ICON, *STYLES, *OWN])
def test_nothing_is_loaded_from_elsewhere(name: str) -> None:
    text = content(name).decode()
    found = re.findall(r"https?://[^\s\"'<>)]+|@import|@font-face", text)
    assert set(found) <= {"http://www.w3.org/2000/svg"}


def test_the_page_names_every_script_and_style_once_in_their_order() -> None:
    text = content(INDEX).decode()
    assert tuple(re.findall(r'<script src="/([^"]+)"></script>', text)) == SCRIPTS
    assert tuple(re.findall(r'<link rel="stylesheet" href="/([^"]+)">', text)) == STYLES
    assert "style=" not in text
    assert not re.search(r"\son\w+=", text)


def test_a_report_is_one_file_that_asks_for_nothing(tmp_path: Path) -> None:
    hostile = {**RECORDS[1], "text": "</script><script>alert(1)</script><!--"}
    folder = make_run(tmp_path)
    write_ledger(folder, [hostile])
    text = report([folder], 1_795_000_100.0).decode()
    assert 'src="' not in text
    assert not re.search(r'<link[^>]*href="(?!data:)', text)
    assert "alert(1)</script>" not in text
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    found = json.loads(data)
    assert found["run"]["about"]["name"] == "fixed"
    assert found["run"]["events"][0][2] == hostile["text"]
    assert len(found["run"]["history"]["columns"]["loss"]) == 120


def test_a_report_runs_no_other_script_than_its_own(tmp_path: Path) -> None:
    text = report([make_run(tmp_path)], 0.0).decode()
    [csp] = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in csp
    assert "default-src 'none'" in csp


def test_a_report_compares_runs(tmp_path: Path) -> None:
    folders = [make_run(tmp_path, name) for name in ("a", "b")]
    text = report(folders, 0.0).decode()
    [data] = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    others = json.loads(data)["others"]
    assert [each["about"]["name"] for each in others] == ["a", "b"]
    assert others[0]["about"]["result"]["weights_sha256"] == others[1]["about"]["result"]["weights_sha256"]
