"""The stream: a picture at once, then row after row, by byte offset; and on from there after any restart."""

from __future__ import annotations

from pathlib import Path

from tests.page.folders import HASH, add_rows, hold, line, make_run, row
from tests.page.serving import opened, page, until
from tests.sockets import free_port
from w5xde.page.stream import MISSED_BYTES_MAX
from w5xde.runs import STATE_VARIABLE


def test_a_finished_run_is_shown_whole_with_the_sentences_of_the_terminal(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with opened(folder) as visitor, visitor.stream() as events:
        history, offset = until(events, "history")
        assert offset == (folder / "metrics.jsonl").stat().st_size
        assert len(history["columns"]["step"]) == 120
        assert history["evaluations"][-1][0] == 360
        about, _ = until(events, "about")
        assert about["name"] == "fixed"
        assert about["result"]["weights_sha256"] == HASH
        nodes, _ = until(events, "nodes")
        assert nodes["pi-5"]["codec_reason"] == "zstd:1: 12 ms instead of 40 ms"
        assert abs(sum(nodes["pi-5"]["shares"]) - 1) < 1e-3
        happened, _ = until(events, "events")
        assert [kind for _, kind, _ in happened] == ["start", "joined", "expired", "left", "checkpoint"]
        assert happened[3][2] == "old-lap <img src=x onerror=alert(1)> left"
        now, _ = until(events, "now")
        assert now["state"] == "done"
        assert now["sentences"][0]["question"] == "Is it learning?"
        assert now["sentences"][3]["text"].startswith("Nothing: 360 steps, 0 lost, 0 applied twice")


def test_a_row_that_is_written_comes_and_a_torn_one_is_waited_for(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=3, is_over=False)
    hold(folder)
    with opened(folder) as visitor, visitor.stream() as events:
        until(events, "history")
        whole = line(row(4))
        with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
            file.write(whole[:50])
            # A beat later the half line is still there, and no row has come.
            assert {next(events)[0] for _ in range(8)}.isdisjoint({"row"})
            file.write(whole[50:])
            size = file.tell()
        got, offset = until(events, "row")
        assert got["point"][2] == 12
        assert offset == size


def test_a_browser_that_comes_back_gets_exactly_what_it_has_missed(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=3)
    seen = (folder / "metrics.jsonl").stat().st_size
    add_rows(folder, row(4), row(5))
    with opened(folder) as visitor, visitor.stream(Last_Event_ID=str(seen)) as events:
        kinds = []
        steps = []
        for kind, data, _ in events:
            kinds.append(kind)
            if kind == "row":
                steps.append(data["point"][2])
            if kind == "now":
                break
        assert steps == [12, 15]
        assert "history" not in kinds


def test_after_the_page_is_killed_the_same_token_goes_on_at_the_same_offset(tmp_path: Path) -> None:
    folder, state, port = make_run(tmp_path, rows=3), str(tmp_path / "state"), free_port()
    with opened(folder, port=port, **{STATE_VARIABLE: state}) as visitor:
        with visitor.stream() as events:
            _, offset = until(events, "history")
        token = visitor.token
        visitor.process.kill()
        visitor.process.wait()
    add_rows(folder, row(4))
    with page(folder, port=port, **{STATE_VARIABLE: state}) as again:
        again.token = token
        with again.stream(Last_Event_ID=str(offset)) as events:
            kind, got, _ = next(each for each in events if each[0] in ("history", "row"))
            assert (kind, got["point"][2]) == ("row", 12)


def test_one_that_missed_too_much_or_saw_another_file_is_sent_a_new_history(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=10)
    while (folder / "metrics.jsonl").stat().st_size < MISSED_BYTES_MAX:
        add_rows(folder, *(row(at) for at in range(11, 300)))
    with opened(folder) as visitor:
        for last_id in ("10", "99999999999", "-5", "no number", "9" * 40):
            with visitor.stream(Last_Event_ID=last_id) as events:
                assert next(events)[0] == "history", last_id


def test_a_run_without_news_says_so_and_what_is_safe(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=60, is_over=False)
    hold(folder)
    with opened(folder) as visitor:
        now = visitor.ask("/api/runs/0/history").json["now"]
        assert now["state"] == "training"
        assert now["warning"].startswith("No news for ")
        assert "120 steps survive a crash" in now["warning"]
        hold(folder, pid=2**22 + 1)
        now = visitor.ask("/api/runs/0/history").json["now"]
        assert now["state"] == "gone"
        assert "w5xde train --resume fixed" in now["warning"]


def test_a_run_that_waits_for_its_first_node_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path, rows=0, is_over=False)
    hold(folder)
    with opened(folder) as visitor, visitor.stream() as events:
        now, _ = until(events, "now")
        assert now["state"] == "starting"
        assert now["warning"] == ""
        assert "w5xde ticket new fixed" in now["sentences"][1]["text"]


def test_the_life_of_a_batch_is_told_by_the_ledger(tmp_path: Path) -> None:
    with opened(make_run(tmp_path)) as visitor:
        found = visitor.ask("/api/runs/0/batches/0/1").json
        told = [(each["what"], each.get("node")) for each in found["chain"]]
        assert told == [
            ("lent", "pi-5"),
            ("expired", "pi-5"),
            ("lent", "gpu-box"),
            ("applied", "gpu-box"),
            ("safe", None),
        ]
        assert visitor.ask("/api/runs/0/batches/0/99").json["found"] is False
        assert visitor.ask("/api/runs/0/batches/0/" + "9" * 60).json["found"] is False
