"""What is kept and shown: troubles of disks and terminals do not reach the training."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import resource
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from w5xde.callbacks.status import NodeReport, NodeStatus, RunStatus
from w5xde.cli.panels import step_text
from w5xde.cli.units import duration_text, number_text
from w5xde.cli.view import View
from w5xde.config import Settings
from w5xde.control.trust.failures import SECOND_OPINION
from w5xde.errors import StorageError, TrainingError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.job.code.offer import JobOffer
from w5xde.runs import read_manifest
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.runtime.telemetry.result import Result
from w5xde.sanitize import to_json
from w5xde.ticket import Secret, Ticket, join_line


@contextmanager
def no_file_may_grow() -> Iterator[None]:
    """The system refuses every byte that would make a file longer, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_of_metrics_that_cannot_grow_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    told: list[str] = []
    recorder = RunFolder(Settings(runs=str(tmp_path)), "job")
    recorder.watch(told.append)
    with no_file_may_grow():
        recorder.metrics({"step": 1})
        recorder.metrics({"step": 2})
    assert told == [f"metrics.jsonl cannot be written: {os.strerror(errno.EFBIG)}; training goes on"]
    recorder.close()


def test_a_manifest_has_the_number_of_batches_in_a_step_although_none_was_given(tmp_path: Path) -> None:
    """A later version may have another default, and a resumed run must keep its own."""
    for mode, batches in (("sync", 2), ("async", 1)):
        recorder = RunFolder(Settings(mode=mode, name=mode, runs=str(tmp_path)), "job")
        recorder.manifest({})
        recorder.close()
        assert read_manifest(tmp_path / mode)["settings"]["batches_per_step"] == batches


def test_a_model_that_cannot_be_saved_is_told_with_its_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = RunFolder(Settings(runs=str(tmp_path)), "job")

    def write(name: str, pieces: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder.disk, "write", write)
    with pytest.raises(StorageError, match="cannot be saved"):
        recorder.save_model([b"weights"], lambda sha256: None)
    recorder.close()


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("step 3 made the weights infinite or not a number, and it is not finite", "learning rate"),
        ("epoch 1 is not complete: batch 3 failed wherever tried", "--skip-bad-batches"),
        ("batch 25 of epoch 1 fails wherever it is tried, like 19 before it: TypeError", "--resume mine"),
        ("the data set failed: OSError: gone", "--resume mine"),
    ],
)
def test_a_run_that_cannot_go_on_always_says_what_to_do(reason: str, fix: str) -> None:
    error = TrainingError.because(reason, {"run": "mine"})
    assert fix in error.fix
    assert any(line.startswith("  fix: ") for line in error.lines())


def test_what_is_not_a_number_is_null_for_every_reader_of_json() -> None:
    assert json.loads(to_json({"a": float("nan"), "b": [float("inf")], "c": 1.5})) == {
        "a": None,
        "b": [None],
        "c": 1.5,
    }


def test_others_words_are_shown_as_they_are() -> None:
    out = io.StringIO()
    View(Settings(), out).say("left (bad tag [/nope] [red]here[/red] :smile:)")
    assert out.getvalue() == "left (bad tag [/nope] [red]here[/red] :smile:)\n"


def test_a_closed_terminal_silences_the_view_and_nothing_else() -> None:
    tried: list[str] = []

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise BrokenPipeError

    view = View(Settings(), Closed())
    view.say("hello")
    assert tried
    tried.clear()
    view.say("hello")
    assert tried == []


def test_the_first_line_of_a_run_says_how_many_samples_make_a_step() -> None:
    assert step_text(Settings(batch_size=32)) == "32 × 2 = 64 samples a step"
    assert step_text(Settings(batch_size=500, batches_per_step=16)) == "500 × 16 = 8,000 samples a step"
    assert step_text(Settings(batch_size=32, mode="async")) == "32 samples a step"
    # A sampler makes batches of its own.
    assert step_text(Settings(batch_size=None)) == "2 batches of the sampler a step"
    assert step_text(Settings(batch_size=None, mode="async")) == "a batch of the sampler a step"


# --- a run without nodes --------------------------------------------------------------------------


class QuietRun:
    """A coordinator, as far as a view reads it: a run that was resumed near its end."""

    def __init__(self, *nodes: NodeStatus) -> None:
        self.recent_events: list[tuple[float, str, str]] = []
        self.gatekeeper = SimpleNamespace(is_exposed=False, ticket=TICKET, ticket_shown=TICKET.to_text())
        self.job_offer = JobOffer()
        self.recorder = SimpleNamespace(followers=[])
        self.is_over = False
        self.nodes = list(nodes)

    def status(self) -> RunStatus:
        return RunStatus(
            "mine", "sync", "127.0.0.1:5", 10, step=720, steps_total=744, seconds=3.0, nodes=self.nodes
        )


TICKET = Ticket((("::1", 5),), b"", bytes(8), Secret(bytes(16)), is_clear=True)
WORKING = NodeStatus("a", "cpu", "working", 1, 1.0, 1.0, None, 0.0)
GONE = NodeStatus("b", "cpu", "gone", 1, 1.0, 1.0, None, 0.0)


def lines_of(run: Any, settings: Settings) -> list[str]:
    """What a view says of a run when it begins, with its first line of progress."""
    out = io.StringIO()

    async def show() -> None:
        view = View(settings, out)
        view.started(run, settings, "job.py")
        view.ended()

    asyncio.run(show())
    return out.getvalue().splitlines()


@pytest.mark.parametrize("nodes", [[], [GONE]], ids=["none came", "all left"])
def test_a_run_without_nodes_says_that_it_waits_and_promises_no_end(nodes: list[NodeStatus]) -> None:
    run = QuietRun(*nodes)
    assert run.status().seconds_left is None
    assert lines_of(run, Settings())[-1] == "step 720/744 (0 saved), epoch 0, waiting for nodes"


def test_a_run_with_a_node_and_one_that_is_over_wait_for_nobody() -> None:
    run = QuietRun(WORKING, GONE)
    assert run.status().seconds_left == pytest.approx(0.1)
    assert lines_of(run, Settings())[-1].endswith(" 1 node, 0.1 s left")
    run = QuietRun(GONE)
    run.is_over = True
    assert "waiting" not in lines_of(run, Settings())[-1]


def test_a_second_opinion_is_no_news_and_its_result_is() -> None:
    run = QuietRun(WORKING)
    run.recent_events = [
        (1.0, SECOND_OPINION, "what a gave is computed again to be sure"),
        (2.0, "fault", "others computed it well"),
    ]
    said = "\n".join(lines_of(run, Settings()))
    assert "others computed it well" in said
    assert "to be sure" not in said
    assert "to be sure" in "\n".join(lines_of(run, Settings(log="verbose")))


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (
            NodeReport("a", "mine", 49, 5, over=True),
            "49 batches of mine computed, busy for 2.0 s, 5 counted (done)",
        ),
        (NodeReport("a", "mine", 1, 0), "1 batch of mine computed, busy for 2.0 s, 0 counted so far (done)"),
    ],
)
def test_a_node_says_what_it_computed_and_what_counted(report: NodeReport, said: str) -> None:
    report.seconds_busy, report.reason = 2.0, "done"
    out = io.StringIO()
    View(Settings(), out).show_report(report)
    assert said in out.getvalue()


def test_the_live_display_of_a_run_without_nodes_says_that_it_waits() -> None:
    async def shown(run: Any) -> str:
        view, out = View(Settings(), io.StringIO()), io.StringIO()
        view.started(run, Settings(), "job.py")
        Console(file=out, width=100).print(view.display(100, 40))
        view.ended()
        return out.getvalue()

    alone, helped = (asyncio.run(shown(QuietRun(node))) for node in (GONE, WORKING))
    assert "waiting for nodes" in alone
    assert "left" not in alone
    assert "samples/s" not in alone
    assert "waiting" not in helped
    assert "0.1 s left" in helped


def test_a_resumed_run_that_starts_no_nodes_says_how_to_get_some() -> None:
    told = "this run starts no nodes of its own: join with the line above, or use --nodes 2"
    assert told in lines_of(QuietRun(), Settings(resume="mine", nodes=0))
    assert told not in lines_of(QuietRun(), Settings(resume="mine", nodes=2))
    assert told not in lines_of(QuietRun(), Settings(nodes=0))


def test_a_bound_of_staleness_in_sync_mode_is_told_to_have_no_effect() -> None:
    told = "staleness has no effect in sync mode, where no update is late"
    assert told in lines_of(QuietRun(), Settings(staleness=4))
    assert told not in lines_of(QuietRun(), Settings())
    assert told not in lines_of(QuietRun(), Settings(staleness=4, mode="async"))


def test_a_run_that_sends_its_code_says_so_and_its_line_to_join_needs_no_job() -> None:
    run = QuietRun()
    assert f"  to join:  w5xde join {TICKET.to_text()} job.py" in lines_of(run, Settings())
    code = CodeBundle.of("job.py", {"job.py": b"import helper\n"})
    run.job_offer = JobOffer(code, left_behind=("helper.py", "layers"))
    told = lines_of(run, Settings())
    assert f"  to join:  w5xde join {TICKET.to_text()}" in told
    assert f"  its code: 1 file, 14 B, sha256 {code.sha256}" in told
    assert told[-2].endswith("also need helper.py,layers: send that with --ship helper.py,layers")


def test_one_of_anything_is_told_in_the_singular() -> None:
    assert [number_text(n, "batch") for n in (0, 1, 2000)] == ["0 batches", "1 batch", "2,000 batches"]
    assert number_text(3, "epoch") == "3 epochs"
    out = io.StringIO()
    View(Settings(), out).show_result(result())
    assert "1 epoch, 1 step, 1 sample in" in out.getvalue()
    assert "1 node, 1 batch, 0 of them lent again" in out.getvalue()
    assert "1 evaluation skipped" in out.getvalue()
    assert "1 batch set aside" in out.getvalue()
    assert "1 epoch, 1 step, 1 sample in 1.0 s (done)" in repr(result())
    assert "2 epochs, 1 step" in repr(result(epochs=2))


def result(**facts: Any) -> Result:
    """The result of a run of one step."""
    summary = {
        **dict.fromkeys(("batches_relent", "bytes_sent", "bytes_received"), 0),
        **dict.fromkeys(("epochs", "steps", "samples", "batches", "seconds"), 1),
        **dict.fromkeys(("verified_batches", "unverified_batches"), 0),
        "run": "mine",
        "nodes": [{}],
        "over": True,
        "loss_first": None,
        "loss_last": None,
        "metrics": {},
        "metrics_step": None,
        "best": None,
        "evaluations_skipped": 1,
        "bad_batches": [{}],
        "robust": "off",
        "gradient_noise_batches": None,
        "weights_sha256": "0" * 64,
        **facts,
    }
    return Result(torch.nn.Linear(1, 1), summary, Path("runs/mine").absolute(), "done")


def summary_of(result: Result, job_name: str = "job.py") -> list[str]:
    """What a view says of a run when it has ended."""
    out = io.StringIO()

    async def show() -> None:
        view = View(Settings(), out)
        view.started(QuietRun(), Settings(), job_name)  # type: ignore[arg-type]
        view.ended()
        view.show_result(result)

    asyncio.run(show())
    lines = out.getvalue().splitlines()
    return lines[next(i for i, line in enumerate(lines) if "  run mine  " in line and "epoch" in line) :]


def test_the_losses_of_training_and_evaluation_are_told_apart() -> None:
    facts = {"loss_first": 2.3, "loss_last": 0.07, "loss_average": 0.5}
    measured = {"metrics": {"accuracy": 0.97, "loss": 0.09}, "metrics_step": 1, "weights_step": 1}
    ended = result(**facts, **measured)
    assert "  loss 2.3000 → 0.0700 (average 0.5000)   evaluation: accuracy 0.97, loss 0.09" in summary_of(
        ended
    )
    assert "  loss 2.3 → 0.07\n  evaluation: accuracy 0.97, loss 0.09\n" in repr(ended)
    assert "  loss 2.3000 → 0.0700 (average 0.5000)" in summary_of(result(**facts))


def test_files_are_named_as_seen_from_here() -> None:
    best = {"metric": "loss", "value": 0.1, "step": 7, "file": "best.safetensors"}
    told = summary_of(result(best=best))
    assert "  best loss 0.1 after step 7, in  runs/mine/best.safetensors" in told
    assert told[-1] == f"  weights sha256 {'0' * 16}…  in  runs/mine/model.safetensors"


def test_a_run_that_was_interrupted_is_not_called_done_and_says_how_to_go_on() -> None:
    assert summary_of(result())[0].startswith("done  run mine")
    stopped = result(over=False)
    told = summary_of(stopped)
    assert told[0].startswith("stopped  run mine")
    assert told[-1] == "  to go on:  w5xde train --resume mine"
    assert summary_of(stopped, "JOB")[-1] == "  to go on:  w5xde.train(job, resume='runs/mine')"
    stopped.folder = Path("my runs/mine").absolute()
    assert summary_of(stopped)[-1] == "  to go on:  w5xde train --resume mine --runs 'my runs'"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.25, "1.2 s"), (61, "1:01"), (3600, "1:00:00"), (90000, "25:00:00")]
)
def test_times_are_shown_as_people_read_them(seconds: float, shown: str) -> None:
    assert duration_text(seconds) == shown


def test_a_join_line_can_be_pasted_whatever_the_job_is_called() -> None:
    ticket = Ticket((("::1", 5),), b"", bytes(8), Secret(bytes(16)), is_clear=True).to_text()
    assert join_line(ticket, "my jobs/train.py") == f"w5xde join {ticket} 'my jobs/train.py'"
    assert shlex.split(join_line(ticket, "train.py"))[3] == "train.py"
    assert shlex.split(join_line("@my keys/ticket")) == ["w5xde", "join", "@my keys/ticket"]
