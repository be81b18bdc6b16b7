"""The live display fits every terminal, is wiped when its size changes, and has one line for each machine."""

from __future__ import annotations

import asyncio
import io
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.status import NodeStatus, RunStatus
from w5xde.cli.panels import LinePart, fitting, machine_table, progress, rates
from w5xde.cli.screen.line_pace import SECONDS_MAX, SECONDS_MIN, LinePace
from w5xde.cli.screen.live import LivePanel
from w5xde.cli.screen.machines import machine_count, machine_rows
from w5xde.cli.view import View
from w5xde.config import Settings
from w5xde.learn.job.code.offer import JobOffer
from w5xde.ticket import Secret, Ticket, join_line

TICKET = Ticket((("192.168.1.20", 5555),) * 3, bytes(32), bytes(8), Secret(bytes(16)))


def node(name: str, machine: str = "", device: str = "cpu", state: str = "working") -> NodeStatus:
    return NodeStatus(name, device, state, 10, 12.5, 0.25, 0.5, 0.3, 1e6, computing=0.7, machine=machine)


def status(*nodes: NodeStatus, **more: Any) -> RunStatus:
    return RunStatus(
        "mine", "sync", "127.0.0.1:5", 300_000, step=12_345, steps_total=20_000, epoch=61, epochs_total=100,
        durable_steps=12_000, seconds=99.0, loss=0.123,
        evaluation=Evaluation({"accuracy": 0.987, "recall": 0.5}, step=12_000),
        samples_per_second=8_109.0, batches_per_second=253.9, sent_per_second=2.2e6,
        received_per_second=1.4e4, memory_pss_bytes=153_700_000, nodes=list(nodes), **more,
    )  # fmt: skip


CREW = [node(f"desk-{number}" if number > 1 else "desk", "m1") for number in range(1, 9)]
POOL = [node("local-1", "m0"), node("local-2", "m0"), *CREW, node("pi", "m2", state="gone")]


def drawn(renderable: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


# --- fitting --------------------------------------------------------------------------------------


def test_what_matters_least_is_left_out_first() -> None:
    parts = [LinePart(0, "epoch 1"), LinePart(2, "step 5"), LinePart(1, "loss 0.1"), LinePart(2, "9 s left")]
    assert [part.text for part in fitting(parts, 80)] == ["epoch 1", "step 5", "loss 0.1", "9 s left"]
    assert [part.text for part in fitting(parts, 30)] == ["epoch 1", "step 5", "loss 0.1"]
    assert [part.text for part in fitting(parts, 18)] == ["epoch 1", "loss 0.1"]
    assert [part.text for part in fitting(parts, 3)] == ["epoch 1"]


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 100, 132, 200])
def test_no_panel_is_wrapped_or_wider_than_the_terminal(width: int) -> None:
    now = status(*POOL)
    assert len(drawn(progress(now, width), width)) == 1
    assert cell_len(rates(now, width)) <= width
    lines = drawn(machine_table(now, width), width)
    assert len(lines) == 4
    assert all(cell_len(line) <= width for line in lines)


def test_a_usual_terminal_shows_the_whole_name_and_the_rate_of_a_machine() -> None:
    lines = drawn(machine_table(status(*POOL), 80), 80)
    assert lines[0].split() == [
        "machine",
        "device",
        "state",
        "batches/s",
        "share",
        "loss",
        "computes",
        "waits",
    ]
    assert lines[2].split() == [
        "desk",
        "(8",
        "nodes)",
        "cpu",
        "working",
        "100.0",
        "200%",
        "0.5000",
        "70%",
        "30%",
    ]
    assert drawn(machine_table(status(*POOL), 40), 40)[0].split() == ["machine", "state", "batches/s"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (40, 12), (132, 50)])
def test_the_display_of_a_large_pool_is_not_higher_than_the_terminal(width: int, height: int) -> None:
    many = [node(f"box{number}", f"m{number}") for number in range(100)]
    run = FakeRun(*many)
    run.recent_events = [(float(i), "joined", f"box{i} joined " + "x" * 200) for i in range(100)]

    async def show() -> list[str]:
        view = View(Settings(), io.StringIO())
        view.started(run, Settings(), "job.py")  # type: ignore[arg-type]
        for follower in run.recorder.followers:
            follower({"time": 1.0, "life": 1, "step": 9, "loss": 0.5, "node_states": {"gone": 3}})
        lines = drawn(view.display(width, height), width)
        view.ended()
        return lines

    lines = asyncio.run(show())
    # The heading above it is allowed to leave a small terminal, the display itself is not.
    assert len(lines) <= max(height, 15)
    assert any("… " in line and "more" in line for line in lines)
    assert any(line.startswith("learning? It begins") for line in lines) == (height >= 20)
    assert any(line.startswith("fast?") for line in lines) == (height >= 20)
    assert all(cell_len(line) <= width for line in lines)


# --- machines -------------------------------------------------------------------------------------


def test_the_nodes_of_a_machine_are_one_row() -> None:
    rows = machine_rows(POOL)
    assert [row.name for row in rows] == ["local (2 nodes)", "desk (8 nodes)", "pi"]
    assert rows[1].batches_per_second == 100.0
    assert rows[1].computing == pytest.approx(0.7)
    assert rows[2].is_gone
    assert machine_count(POOL) == 2


def test_nodes_that_left_are_counted_but_do_not_blur_the_others() -> None:
    gone = node("desk-9", "m1", state="gone")
    [row] = machine_rows([*CREW, gone])
    assert (row.name, row.state) == ("desk (8 of 9 nodes)", "working")
    assert row.batches_per_second == 100.0
    assert machine_rows([node("desk", "m1", state="gone"), gone])[0].is_gone


def test_nodes_without_a_machine_and_those_of_a_verbose_view_have_rows_of_their_own() -> None:
    assert len(machine_rows([node("a"), node("b")])) == 2
    assert len(machine_rows(CREW, each_node=True)) == 8


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        (["cpu", "cpu"], "cpu"),
        (["cuda:0", "cuda:1"], "2 × cuda"),
        (["cuda:0", "cpu"], "cuda + cpu"),
    ],
)
def test_the_devices_of_a_machine_are_told_together(devices: list[str], shown: str) -> None:
    [row] = machine_rows([node(f"n{i}", "m", device) for i, device in enumerate(devices)])
    assert row.device == shown


# --- a terminal that changes its size ---------------------------------------------------------------


class FakeRun:
    """A coordinator, as far as a view reads it."""

    def __init__(self, *nodes: NodeStatus) -> None:
        self.recent_events: list[tuple[float, str, str]] = []
        self.gatekeeper = SimpleNamespace(is_exposed=False, ticket=TICKET, ticket_shown=TICKET.to_text())
        self.job_offer = JobOffer()
        self.recorder = SimpleNamespace(followers=[])
        self.is_over = False
        self.recorder = SimpleNamespace(followers=[])
        self.nodes = nodes

    def status(self) -> RunStatus:
        return status(*self.nodes)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_resized_terminal_is_wiped_and_everything_is_printed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [ConsoleDimensions(80, 24)]
    monkeypatch.setattr(Console, "size", property(lambda self: sizes[-1]))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    console = Console(file=out, force_terminal=True)
    repeated: list[int] = []
    panel = LivePanel(console, lambda: repeated.append(console.size.width))
    panel.draw(lambda: "one")
    panel.draw(lambda: "two")
    assert (repeated, "\x1b[2J" in out.getvalue()) == ([], False)
    sizes.append(ConsoleDimensions(60, 24))
    panel.draw(lambda: "three")
    panel.close()
    assert repeated == [60]
    wiped = out.getvalue().split("\x1b[2J")
    assert len(wiped) == 2
    assert "three" in wiped[1]
    assert "two" not in wiped[1]


def test_the_line_to_join_is_never_cut_whatever_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Console, "size", property(lambda self: ConsoleDimensions(50, 24)))
    out = Terminal()

    async def show() -> None:
        view = View(Settings(), out)
        view.started(FakeRun(*CREW), Settings(), "job.py")  # type: ignore[arg-type]
        view.ended()

    asyncio.run(show())
    assert f"to join:  {join_line(TICKET.to_text(), 'job.py')}\n" in out.getvalue().replace("\r\n", "\n")


# --- logs and notebooks -----------------------------------------------------------------------------


def test_a_log_grows_quieter_with_time() -> None:
    pace = LinePace()
    moments = [tick / 4 for tick in range(4 * 24 * 3600) if pace.is_due(tick / 4)]
    assert moments[:3] == [0.0, SECONDS_MIN, 2 * SECONDS_MIN]
    in_first_hour = sum(moment < 3600 for moment in moments)
    assert 40 < in_first_hour < 80
    gaps = [b - a for a, b in pairwise(moments)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == SECONDS_MAX
    assert len(moments) < 220


def test_a_notebook_has_one_line_that_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    out = io.StringIO()

    async def show() -> None:
        run = FakeRun(*CREW)
        view = View(Settings(), out)
        view.started(run, Settings(), "job.py")  # type: ignore[arg-type]
        await asyncio.sleep(0.6)
        run.recent_events.append((1.0, "joined", "desk joined"))
        await asyncio.sleep(0.6)
        view.ended()

    asyncio.run(show())
    heading, *written = out.getvalue().split("\r")
    assert "to join:" in heading
    assert len([text for text in written if text.startswith("step 12345/20000")]) >= 3
    assert "desk joined\n" in [text.lstrip() for text in written]
    assert out.getvalue().endswith("\n")


def test_the_shell_of_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    from w5xde.cli.screen.notebook import in_notebook

    modules = sys.modules
    for shell, expected in ((None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=1), True)):
        monkeypatch.setitem(modules, "IPython", SimpleNamespace(get_ipython=lambda found=shell: found))
        assert in_notebook() is expected
    monkeypatch.delitem(modules, "IPython")
    assert in_notebook() is False
