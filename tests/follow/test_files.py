"""What is read of a run folder, and how little of it is kept: points, old rows, events, state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.page.folders import BEGAN_AT, RECORDS, add_rows, hold, line, make_run, node, row, write_ledger
from w5xde.follow import run_follower
from w5xde.follow.chart_points import POINTS_MAX, ChartPoints
from w5xde.follow.ledger_events import LedgerEvents
from w5xde.follow.line_tail import CHUNK_BYTES, last_lines, lines_from
from w5xde.follow.rows import MetricsRow, to_row
from w5xde.follow.run_follower import RunFollower
from w5xde.follow.run_state import state_of
from w5xde.runs import read_manifest


def test_lines_are_found_by_their_offset_and_half_a_line_is_none(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    assert list(lines_from(file, 0)) == []
    long = b"x" * (2 * CHUNK_BYTES)
    file.write_bytes(b"one\n" + long + b"\nthree\nhal")
    found = list(lines_from(file, 0))
    assert [each.text for each in found] == [b"one", long, b"three"]
    assert [each.text for each in lines_from(file, found[0].end)] == [long, b"three"]
    assert list(lines_from(file, found[-1].end)) == []
    assert last_lines(file, 12) == ([b"three"], found[-1].end)


# --- points ---------------------------------------------------------------------------------------


def points_of(rows: list[MetricsRow]) -> ChartPoints:
    points = ChartPoints()
    for each in rows:
        points.add(each)
    return points


def test_a_chart_has_at_most_2000_points_and_no_extreme_is_lost() -> None:
    rows = [to_row(row(at)) for at in range(1, 20_001)]
    rows[777] = to_row(row(778, loss_max=999.0))
    rows[12_345] = to_row(row(12_346, loss_min=-5.0))
    points = points_of(rows)
    columns = points.columns()
    assert POINTS_MAX / 2 <= len(points) <= POINTS_MAX
    assert max(high for high in columns["high"] if high is not None) == 999.0
    assert min(low for low in columns["low"] if low is not None) == -5.0
    assert columns["step"][-1] == 3 * 20_000
    assert columns["step"] == sorted(columns["step"], key=lambda step: step or 0)
    assert len({len(column) for column in columns.values()}) == 1


def test_a_mean_of_means_is_that_of_all_rows() -> None:
    rows = [to_row(row(at, loss=float(at % 2))) for at in range(1, 4 * POINTS_MAX + 1)]
    losses = points_of(rows).columns()["loss"]
    assert sum(each or 0 for each in losses) / len(losses) == pytest.approx(0.5, abs=0.01)


def test_what_a_crash_made_void_is_drawn_anew() -> None:
    before = [to_row(row(at)) for at in range(1, 101)]
    after = [to_row(row(at, life=2)) for at in range(60, 80)]
    points = points_of([*before, *after])
    steps = points.columns()["step"]
    assert steps[-1] == 3 * 79
    assert steps == sorted(steps, key=lambda step: step or 0)
    assert points.lives == [(2, 180)]
    assert points.evaluations[-1][0] <= 3 * 79


def test_a_loss_that_is_no_number_is_no_point() -> None:
    points = points_of([to_row(row(1)), to_row(row(2, loss=None, loss_min=None, loss_max=None))])
    assert points.columns()["loss"][1] is None


# --- old rows -------------------------------------------------------------------------------------


def test_old_rows_say_the_same_and_nodes_that_left_long_ago_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path, rows=0)
    names = tuple(f"node-{number}" for number in range(9))
    left = {"gone-early": node("gone-early", 1.0, state="gone")}
    add_rows(folder, row(1, names), row(2, names, node_facts=left), *(row(at, names) for at in range(3, 200)))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time":1,"torn":{"x":\n[]\n{"step":"no number"}\n')
        # An older version wrote rows without facts of nodes.
        file.write(b'{"seconds":50.0,"step":600,"loss":0.1,"nodes":{"a":1}}\n')
    add_rows(folder, row(201, names))
    whole = RunFollower(folder)
    whole.poll()
    monkeypatch.setattr(run_follower, "WHOLE_BYTES", 1000)
    quick = RunFollower(folder)
    quick.poll()
    assert quick.points.columns() == whole.points.columns()
    assert quick.points.evaluations == whole.points.evaluations
    assert quick.offset == whole.offset == (folder / "metrics.jsonl").stat().st_size
    assert quick.history.nodes["gone-early"].state == "gone"
    assert quick.history.nodes.keys() >= set(names)
    assert [each.text for each in quick.answers(0)] == [each.text for each in whole.answers(0)]


def test_a_run_that_is_removed_and_made_again_is_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=50)
    run = RunFollower(folder)
    run.poll()
    (folder / "metrics.jsonl").write_bytes(line(row(1)))
    assert run.poll()
    assert run.points.columns()["step"] == [3]


# --- events ---------------------------------------------------------------------------------------


def test_events_are_what_people_want_to_read_and_come_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    events = LedgerEvents(folder)
    assert [event.kind for event in events.poll()] == ["start", "joined", "expired", "left", "checkpoint"]
    assert events.poll() == []
    more = {"time": BEGAN_AT + 20, "kind": "banned", "node": "old-lap", "reason": "bad\x1b[31m updates"}
    # A new segment repeats what was not on the disk yet.
    write_ledger(folder, [RECORDS[-1], more], number=2)
    assert [event.text for event in events.poll()] == ["old-lap is banned: bad updates"]
    gap = {"time": BEGAN_AT + 21, "kind": "gap", "records": 3}
    write_ledger(folder, [RECORDS[-1], more, gap], number=2)
    assert [event.kind for event in events.poll()] == ["gap"]
    assert events.trouble == ["the disk failed, and 3 records of the ledger are missing"]


def test_a_damaged_ledger_is_no_end_of_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with (folder / "ledger-000001.jsonl").open("ab") as file:
        file.write(b'{"sha256":"zz"}\n\xff\xfe\n{"sha256":"' + b"0" * 64 + b'","sealed":{"kind":7}}\n')
    assert len(LedgerEvents(folder).poll()) == 5
    (folder / "ledger-000002.jsonl.zst").write_bytes(b"no zstd")
    assert LedgerEvents(folder).poll()[-1].kind == "checkpoint"


# --- state ----------------------------------------------------------------------------------------


def word(folder: Path, age: float | None) -> str:
    return state_of(folder, read_manifest(folder), age).word


def test_the_state_of_a_run_is_told_by_its_files(tmp_path: Path) -> None:
    assert word(make_run(tmp_path, "over"), 5.0) == "done"
    stopped = {"result": {"over": False}, "reason": "interrupted"}
    assert word(make_run(tmp_path, "stopped", is_over=False, **stopped), 5.0) == "stopped"
    running = make_run(tmp_path, "running", is_over=False)
    assert word(running, 0.1) == "gone", "it has no lock"
    hold(running)
    assert word(running, 0.1) == "training"
    assert word(running, None) == "starting"
    hold(running, pid=2**22 + 1)
    assert word(running, 0.1) == "gone"
    (running / "lock").write_text('{"pid": 1, "host": "another-machine"}')
    assert (word(running, 2.0), word(running, 600.0)) == ("training", "gone")
    (running / "lock").write_text('{"pid": "')
    assert word(running, 0.1) == "gone"


def test_following_a_run_loads_no_torch() -> None:
    code = "import sys, w5xde.follow.run_follower, w5xde.follow.batch_life, w5xde.page.command\n"
    code += "sys.exit(bool({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
