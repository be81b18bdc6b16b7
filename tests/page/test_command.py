"""`w5xde show`, and `--page` of the commands that train: real processes."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from tests.page.folders import make_run
from tests.page.serving import Visitor, opened
from tests.processes import HERE, JOBS, command, run_json, run_python, wait_until
from w5xde.cli.main import main
from w5xde.runs import STATE_VARIABLE


def test_show_prints_one_object_with_the_address(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    make_run(tmp_path, "b")
    with opened(tmp_path / "a", tmp_path / "b") as visitor:
        assert visitor.facts["runs"] == ["a", "b"]
        assert visitor.facts["sha256"] == ""
        assert visitor.ask("/api/runs").json == {"runs": ["a", "b"]}


def test_an_interrupt_ends_the_page_in_order(tmp_path: Path) -> None:
    with opened(make_run(tmp_path)) as visitor, visitor.stream() as events:
        next(events)
        visitor.process.interrupt()
        assert visitor.process.wait() == 0


def test_the_terminal_offers_another_link_when_one_is_used(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with command("show", str(folder), "--no-open", "--port", "0") as process:
        first = process.wait_for("page  ").split()[-1]
        visitor = Visitor(process, first)
        assert visitor.login().status == 200
        another = Visitor(process, process.wait_for("another browser").split()[-1])
        assert another.login().status == 200
        assert another.token != visitor.token


def test_a_port_that_is_taken_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path)
    with socket.create_server((HERE, 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["show", str(folder), "--port", port, "--no-open"]) == 2
    assert "error[W5-650]" in capsys.readouterr().err


def test_an_address_of_another_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path)
    assert main(["show", str(folder), "--host", "no-such-host.invalid", "--no-open"]) == 2
    assert "error[W5-650]" in capsys.readouterr().err


def test_more_runs_than_can_be_told_apart_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path)
    assert main(["show", *[str(folder)] * 9]) == 2
    assert "error[W5-651]" in capsys.readouterr().err


def test_a_report_is_written_and_says_where(tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "tuesday")
    file = tmp_path / "tuesday.html"
    said = run_json("show", "tuesday", "--html", str(file), cwd=tmp_path)
    assert said == {"file": str(file), "bytes": file.stat().st_size, "runs": ["tuesday"]}
    shown = run_python("-m", "w5xde", "show", "--html", str(file), cwd=tmp_path).stdout
    assert shown.startswith(f"wrote {file} (")


def test_a_report_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path)
    assert main(["show", str(folder), "--html", str(tmp_path / "no" / "where.html")]) == 40
    assert "error[W5-652]" in capsys.readouterr().err


def test_a_page_beside_a_run_shows_it_and_ends_with_its_process(tmp_path: Path) -> None:
    flags = ("--nodes", "1", "--name", "beside", "--steps", "100000", "--page")
    with command(
        "train", f"{JOBS}:job", *flags, cwd=tmp_path, **{STATE_VARIABLE: str(tmp_path / "s")}
    ) as train:
        visitor = Visitor(train, train.wait_for("page:  ").split()[-1])
        assert visitor.login().status == 200
        with visitor.stream() as events:
            row = next(data for kind, data, _ in events if kind == "row")
            assert row["point"][1] == 1
            train.kill()

            def is_gone() -> bool:
                with socket.socket() as probe:
                    return probe.connect_ex((HERE, visitor.port)) != 0

            wait_until(is_gone, lambda: "the page outlives the process that started it")


def test_a_run_remembers_no_page(tmp_path: Path) -> None:
    said = run_json("train", f"{JOBS}:job", "--nodes", "1", "--steps", "2", "--page", cwd=tmp_path)
    folder = tmp_path / "runs" / said["run"]
    assert json.loads((folder / "manifest.json").read_text())["settings"]["page"] is True
    again = run_json("train", "--resume", said["run"], "--print-config", cwd=tmp_path)
    assert again["settings"]["page"]["value"] is False


def test_help_names_the_page() -> None:
    shown = run_python("-m", "w5xde", "show", "--help").stdout
    assert re.search(r"usage: w5xde show \[RUN \.\.\.\] \[options\]", shown)
    assert "--parent" not in shown
    assert "--page" in run_python("-m", "w5xde", "demo", "--help").stdout
