"""Bad input: one clear error, a way out, another exit code than 0, and the pool goes on."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import w5xde
from tests.processes import JOBS, AtStep, command, events, ticket_of
from tests.sockets import clear_ticket
from w5xde.callbacks.status import RunStatus
from w5xde.cli.main import main
from w5xde.errors import JobError
from w5xde.messages import PROTOCOL_VERSION, Hello
from w5xde.protocol.wire import encode
from w5xde.runtime.durable.audit import audit_run

PREAMBLE = """
import torch, w5xde
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

def make(**changes):
    parts = dict(
        model=lambda: nn.Linear(4, 3),
        data=lambda: TensorDataset(torch.randn(64, 4), torch.zeros(64).long()),
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    return w5xde.Job(**{**parts, **changes})
"""

COUNTING = """
class Net(nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return super().forward(x)

job = make(model=lambda: Net(4, 3))
"""

CASES = {
    "no job": ("", "W5-206", "there is no Job in"),
    "several jobs": ("a = make(); b = make()", "W5-207", "has 2 jobs: a, b"),
    "syntax error": ("job = make(", "W5-208", "SyntaxError"),
    "raises on import": ("raise ValueError('oops')", "W5-208", "ValueError: oops (job.py, line"),
    "empty data": (
        "job = make(data=lambda: TensorDataset(torch.empty(0, 4)))",
        "W5-204",
        "the data set is empty",
    ),
    "unsendable": (
        "job = make(data=lambda: [object()] * 9)",
        "W5-203",
        "holds a object, which cannot be sent",
    ),
    "ragged": ("job = make(data=lambda: [torch.zeros(i + 1) for i in range(9)])", "W5-204", "has shape ("),
    "loss not a scalar": ("job = make(loss=lambda m, b: m(b[0]))", "W5-205", "not one number"),
    "loss not finite": ("job = make(loss=lambda m, b: m(b[0]).sum() / 0)", "W5-205", "on the first batch"),
    "wrong labels": (
        "job = make(loss=lambda m, b: cross_entropy(m(b[0]), b[1].float()))",
        "W5-205",
        "class numbers must be integers",
    ),
    "trains at its top level": (
        "job = make()\nw5xde.train(job)",
        "W5-242",
        'if __name__ == "__main__":',
    ),
    "trains nothing": (
        "other = nn.Linear(4, 3)\njob = make(loss=lambda m, b: cross_entropy(other(b[0]), b[1]))",
        "W5-205",
        "does not depend on any parameter of the model",
    ),
    "counts in Python": (
        COUNTING,
        "W5-243",
        "w5xde.current().step",
    ),
    "float64": (
        "import numpy as np\njob = make(data=lambda: [(np.zeros(4), 1)] * 9)",
        "W5-205",
        "batch[0] is float64",
    ),
    "model is no module": ("job = make(model=lambda: 3)", "W5-202", "model() returned a int"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_cannot_be_trained_is_refused_in_the_users_words(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, code, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(PREAMBLE + source)
    assert main(["train", "job.py", "--nodes", "1"]) == JobError.exit_code
    told = capsys.readouterr().err
    assert words in told
    assert told.startswith(f"error[{code}]: ")
    assert told.endswith(f"\n  more: w5xde explain {code}\n")
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("arguments", "status", "code", "words"),
    [
        (["train", "nowhere.py"], 20, "W5-206", "there is no job file nowhere.py"),
        (["train", "no.such.module:job"], 20, "W5-206", "neither a file nor a module"),
        (["train", f"{JOBS}:jbo"], 20, "W5-206", "did you mean"),
        (["train", JOBS], 20, "W5-207", "name one"),
        (["train", f"{JOBS}:job", "--batchsize", "3"], 2, "W5-210", "Did you mean --batch-size?"),
        (["train", f"{JOBS}:job", "--batch-size", "0"], 2, "W5-210", "batch-size 0 must be 1 or more"),
        (
            ["train", f"{JOBS}:job", "--mode", "semi"],
            2,
            "W5-210",
            "mode 'semi' must be sync, async",
        ),
        (["train", f"{JOBS}:job", "--name", "../up"], 2, "W5-210", "must be letters"),
        (["train", f"{JOBS}:job", "--device", "cuda"], 2, "W5-301", "--devices auto"),
        (
            ["train", f"{JOBS}:counting_stream", "--data", "local"],
            20,
            "W5-204",
            "--data local needs a map-style",
        ),
        (
            ["train", f"{JOBS}:counting_stream", "--data", "cached"],
            20,
            "W5-204",
            "--data cached needs a map-style",
        ),
        (["train", f"{JOBS}:augmented", "--data", "cached"], 20, "W5-250", "use --data stream"),
        (
            ["train", f"{JOBS}:images", "--data", "cached", "--cache-bytes", "12000"],
            20,
            "W5-251",
            "make it larger",
        ),
        (["join", "nowhere", f"{JOBS}:job"], 10, "W5-101", "this is not a ticket"),
        (["join", "192.168.1.20:5555", f"{JOBS}:job"], 2, "W5-111", "w5xde ticket new"),
        (["join", f"{JOBS}:job"], 2, "W5-116", "no ticket was given"),
        (["join", "@nowhere", f"{JOBS}:job"], 2, "W5-116", "nowhere cannot be read"),
        (["join", "@ticket"], 2, "W5-116", "the ticket's file ticket cannot be read"),
        (
            ["join", clear_ticket("127.0.0.1:1"), "--wait", "0"],
            10,
            "W5-103",
            "nothing answers at",
        ),
        (["join", "--threads", "4"], 2, "W5-210", "has no flag --threads; train and serve have it"),
        (["join", "@ticket", f"{JOBS}:job", "--wiat=3"], 2, "W5-210", "Did you mean --wait?"),
        (["train", f"{JOBS}:job", "more"], 2, "W5-210", "more is one word too many"),
        (
            ["join", clear_ticket("127.0.0.1:1"), f"{JOBS}:job", "--wait", "0"],
            10,
            "W5-103",
            "nothing answers at 127.0.0.1:1",
        ),
    ],
)
def test_a_mistyped_command_is_told_what_to_do(
    arguments: list[str],
    status: int,
    code: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == status
    told = capsys.readouterr().err
    assert f"error[{code}]: " in told
    assert words in told
    assert "Traceback" not in told


def test_a_port_that_is_taken_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["train", f"{JOBS}:job", "--port", port, "--runs", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error[W5-110]: ")
    assert f"port {port}" in told
    assert "--port 0" in told
    assert not list(tmp_path.iterdir()), "a run that never began leaves no folder"


def test_a_run_whose_port_is_taken_leaves_no_key_behind(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("W5XDE_STATE", str(state))
    for folder in ("runs", "again"):
        with socket.create_server(("0.0.0.0", 0)) as taken:
            port = str(taken.getsockname()[1])
            runs = str(tmp_path / folder)
            # Everywhere: with TLS, and so with a certificate of the run's own.
            assert main(["serve", f"{JOBS}:job", "--host", "0.0.0.0", "--port", port, "--runs", runs]) == 2
        assert "error[W5-110]" in capsys.readouterr().err
        assert not list(state.rglob("*.pem"))
        assert not list((tmp_path / folder).iterdir())


def test_a_name_that_exists_is_not_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    assert main(["train", f"{JOBS}:job", "--name", "kept", "--runs", str(tmp_path)]) == 40
    assert "error[W5-403]: there is a run named kept already" in capsys.readouterr().err


# --- strangers at the door ------------------------------------------------------------------------


def hello(**changes: object) -> bytes:
    return encode(
        msgspec.structs.replace(Hello(protocol=PROTOCOL_VERSION, package="0", name="stranger"), **changes)
    )


def raw_hello(**fields: object) -> bytes:
    """A greeting as somebody writes it who does not use our messages."""
    meta = msgspec.msgpack.encode({"type": "hello", "protocol": PROTOCOL_VERSION, "package": "0", **fields})
    return struct.pack("<2sBBIQ", b"W5", 1, 0, len(meta), 0) + meta


STRANGERS: dict[str, bytes] = {
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20,
    "a frame too long": struct.pack("<2sBBIQ", b"W5", 1, 0, 10, 2**40) + b"x" * 100,
    "a message too long": struct.pack("<2sBBIQ", b"W5", 1, 0, 2**31, 0) + b"x" * 100,
    "nonsense inside a frame": struct.pack("<2sBBIQ", b"W5", 1, 0, 4, 0) + b"\xff\xff\xff\xff",
    "another protocol": hello(protocol=99),
    "another run": hello(run="tuesday"),
    "a greeting twice": hello() + hello(),
    "words that a terminal obeys": raw_hello(name="rude", run="\x1b[2J\u202e\x9b31mrudely"),
    "a name that a terminal obeys": raw_hello(name="\x1b[2J"),
    "nothing": b"",
}


def test_strangers_are_sent_away_and_the_pool_goes_on(tmp_path: Path) -> None:
    answers: dict[str, bytes] = {}
    sockets: list[socket.socket] = []

    def knock(words: bytes) -> Callable[[RunStatus], None]:
        def action(run: RunStatus) -> None:
            host, _, port = run.address.rpartition(":")
            knocking = socket.create_connection((host, int(port)))
            knocking.sendall(words)
            sockets.append(knocking)

        return action

    actions = {2 + i: knock(words) for i, words in enumerate(STRANGERS.values())}
    result = w5xde.train(f"{JOBS}:slow", nodes=2, steps=18, runs=str(tmp_path), callbacks=[AtStep(actions)])
    for name, knocking in zip(STRANGERS, sockets, strict=True):
        knocking.settimeout(5)
        try:
            answers[name] = knocking.recv(65536)
        except ConnectionResetError:
            answers[name] = b""
        knocking.close()
    assert result.summary["steps"] == 18
    assert len(answers) == len(STRANGERS)
    refusals = {name: answer.decode(errors="replace") for name, answer in answers.items()}
    assert "W5-107" in refusals["another protocol"]
    assert "speaks protocol 99" in refusals["another protocol"]
    for name in ("another run", "words that a terminal obeys"):
        # Not even the name of the run is told to who has no ticket.
        assert "W5-113" in refusals[name]
        assert result.summary["run"] not in refusals[name]
    told = str(events(result.folder))
    assert "127.0.0.1 was turned away: this is not a w5xde connection" in told
    assert "127.0.0.1 was turned away: joining needs a ticket" in told
    assert not {"\x1b", "\x9b", "\u202e"} & set(told)


def test_a_node_with_another_model_is_refused_by_the_first_difference(tmp_path: Path) -> None:
    with command("serve", f"{JOBS}:job", "--port", "0", "--runs", str(tmp_path)) as coordinator:
        ticket = ticket_of(coordinator)
        with command("join", ticket, f"{JOBS}:other") as wrong:
            assert wrong.wait() == 10
        assert "0.weight (17, 10) float32, expected (16, 10) float32" in wrong.text
        assert "use the coordinator's job file" in wrong.text
        assert "0.weight (17, 10)" in coordinator.wait_for("did not join")
        with command("join", ticket, f"{JOBS}:job") as right:
            assert right.wait() == 0, right.text
        assert coordinator.wait() == 0, coordinator.text


@pytest.mark.parametrize(
    ("job", "words"),
    [("poisoned", r"ValueError: this sample is \[/poison\] \(jobs.py"), ("quitting", "SystemExit: 3")],
)
def test_a_batch_that_fails_everywhere_keeps_its_epoch_from_being_complete(
    job: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_POISON", "3.4")
    with pytest.raises(w5xde.TrainingError, match=rf"epoch 1 is not complete: batch\w* .*{words}") as failure:
        w5xde.train(f"{JOBS}:{job}", nodes=2, epochs=3, name="bad", runs=str(tmp_path))
    assert failure.value.code == "W5-311"
    assert "--skip-bad-batches" in failure.value.fix
    report = audit_run(tmp_path / "bad")
    assert report.is_clean, report.findings.violations
    assert report.findings.epochs == 0
    bad = [record for record in events(tmp_path / "bad") if record["kind"] == "aside"]
    assert {(record["epoch"], record["batch"]) for record in bad} == set(report.findings.aside)
    # Two of them, unless the second had not joined yet.
    assert all(set(record["nodes"]) <= {"local-1", "local-2"} for record in bad)
    # What was mended is tried again, and then the epoch is complete.
    monkeypatch.setenv("TEST_POISON", "1e9")
    result = w5xde.train(f"{JOBS}:{job}", resume="bad", runs=str(tmp_path))
    assert result.summary["epochs"] == 3
    assert result.summary["samples"] == 600
    assert audit_run(tmp_path / "bad").is_clean


def test_bad_batches_may_be_skipped_and_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_POISON", "3.4")
    for mode in ("sync", "async"):
        result = w5xde.train(
            f"{JOBS}:poisoned",
            nodes=2,
            epochs=2,
            mode=mode,
            name=mode,
            runs=str(tmp_path),
            skip_bad_batches=True,
        )
        assert result.summary["epochs"] == 2
        assert {bad["epoch"] for bad in result.summary["bad_batches"]} == {1, 2}
        assert "poison" in result.summary["bad_batches"][0]["reason"]
        assert result.summary["batches"] == 14 - len(result.summary["bad_batches"])
        report = audit_run(result.folder)
        assert report.is_clean, report.findings.violations
        assert len(report.findings.aside) == len(result.summary["bad_batches"])


def test_a_run_whose_every_batch_fails_is_given_up_soon(tmp_path: Path) -> None:
    with pytest.raises(w5xde.TrainingError, match="epoch 1 is not complete") as failure:
        w5xde.train(f"{JOBS}:diverging", nodes=2, epochs=300, runs=str(tmp_path))
    assert "learning rate" in failure.value.fix, failure.value


# --- samples that cannot be read ------------------------------------------------------------------

TORN = {"batch_size": 10, "shuffle": False, "epochs": 3, "skip_bad_batches": True}


@pytest.mark.parametrize(
    "given",
    [
        {"data": "stream"},
        {"data": "stream", "loader_workers": 2},
        {"data": "local"},
        {"data": "cached"},
        {"data": "stream", "mode": "async"},
    ],
    ids=["stream", "workers", "local", "cached", "async"],
)
def test_a_sample_that_cannot_be_read_costs_its_batch_and_no_other(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TORN", "57")
    result = w5xde.train(f"{JOBS}:torn", nodes=2, runs=str(tmp_path), **TORN, **given)
    assert result.summary["epochs"] == 3
    bad = result.summary["bad_batches"]
    assert [(each["epoch"], each["batch"]) for each in bad] == [(1, 5), (2, 5), (3, 5)]
    assert all("OSError: this file is [/torn] (jobs.py, line" in each["reason"] for each in bad)
    counts = result.model.get_parameter("count").detach()
    # A step is the mean over its batches, so each sample of it counts for as much as there are.
    assert [i for i, count in enumerate(counts.tolist()) if count == 0] == list(range(50, 60))
    report = audit_run(result.folder)
    assert report.is_clean, report.findings.violations
    assert report.findings.aside == [(0, 5), (1, 5), (2, 5)]
    assert report.findings.samples == 3 * 190


def test_in_rounds_a_sample_that_cannot_be_read_costs_its_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TORN", "57")
    flags = {"mode": "rounds", "batches_per_step": 4, "local_steps": 2, **TORN}
    result = w5xde.train(f"{JOBS}:torn", nodes=2, runs=str(tmp_path), **flags)
    assert result.summary["epochs"] == 3
    # The second column of the round from batch 0 to 7.
    assert [each["batch"] for each in result.summary["bad_batches"]] == [1, 5] * 3
    assert audit_run(result.folder).is_clean


def test_without_the_flag_a_torn_sample_is_tried_again_when_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TORN", "57")
    flags = {**TORN, "skip_bad_batches": False, "name": "torn"}
    with pytest.raises(w5xde.TrainingError, match=r"epoch 1 is not complete: batch 5 .*torn") as failure:
        w5xde.train(f"{JOBS}:torn", nodes=2, runs=str(tmp_path), **flags)
    assert "--skip-bad-batches" in failure.value.fix
    assert audit_run(tmp_path / "torn").is_clean
    monkeypatch.delenv("TEST_TORN")
    result = w5xde.train(f"{JOBS}:torn", resume="torn", runs=str(tmp_path))
    assert (result.summary["epochs"], result.summary["samples"]) == (3, 600)
    assert audit_run(tmp_path / "torn").is_clean
