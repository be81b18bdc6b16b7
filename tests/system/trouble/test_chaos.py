"""Real processes that are killed while they train: the same weights, and a ledger that adds up."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.processes import Process, start_command
from w5xde.chaos.child import Command
from w5xde.chaos.pool import ChaosPool
from w5xde.chaos.show import run_chaos_demo
from w5xde.chaos.verdict import Verdict, judge
from w5xde.config import Settings
from w5xde.control.audit.auditor import Findings
from w5xde.errors import TrainingError
from w5xde.runtime.durable.audit import AuditReport, audit_run

ROUNDS = 5
ROUND_STEPS = 18
NODES = 3


def start(command: Command) -> Process:
    """Start a process of the pool without loading torch again, which would take half a minute in all."""
    return start_command(command.words, command.folder, command.environment, command.log)


def test_ten_kills_of_nodes_and_five_of_the_coordinator_change_no_bit(tmp_path: Path) -> None:
    settings = Settings(batches_per_step=4, steps=ROUNDS * ROUND_STEPS + 5, runs=str(tmp_path))
    pool = ChaosPool(tmp_path / "hurt", settings, print, start=start)
    with pool.open():
        for _ in range(NODES):
            pool.add_node()
        for number in range(ROUNDS):
            # One that computes for a coordinator that is there; its batches are lent again.
            pool.until_step(number * ROUND_STEPS + 4)
            _kill(pool, number)
            # One together with the coordinator; the others find their way back by themselves.
            pool.until_step(number * ROUND_STEPS + 10)
            _kill(pool, number + 1)
            assert pool.kill(pool.coordinator)
        pool.finish()
    verdict = judge(pool.run, settings)
    verdict.require()
    found = verdict.report.findings
    assert pool.summary()["kills"] == 10
    assert pool.summary()["coordinator_kills"] == found.crashes == 5
    assert found.steps == settings.steps
    assert found.violations == []
    with pytest.raises(TrainingError, match="the audit of run tampered found"):
        dataclasses.replace(verdict, report=audit_run(_tampered(pool.run))).require()


def _kill(pool: ChaosPool, number: int) -> None:
    victim = pool.nodes[number % NODES]
    pool.until(lambda: victim.is_working, f"{victim.name} is there to be killed")
    assert pool.kill(victim)


def _tampered(run: Path) -> Path:
    """A copy whose first step claims to have been given by somebody else."""
    copy = Path(shutil.copytree(run, run.with_name("tampered")))
    ledger = min(copy.glob("ledger-*.jsonl"))
    lines = ledger.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"kind":"step"' in line)
    lines[at] = lines[at].replace('"node-', '"nobody-')
    ledger.write_text("".join(lines))
    return copy


def test_what_does_not_hold_is_an_error_that_says_why() -> None:
    clean, broken = (
        AuditReport("r", Findings(), {}),
        AuditReport("r", Findings(violations=["batch 3 came twice"]), {}),
    )
    Verdict("a", "a", 0.9, clean).require()
    with pytest.raises(TrainingError) as other_weights:
        Verdict("a", "b", 0.9, clean).require()
    assert other_weights.value.code == "W5-312"
    with pytest.raises(TrainingError) as not_clean:
        Verdict("a", "a", 0.9, broken).require()
    assert (not_clean.value.code, not_clean.value.why) == ("W5-313", "batch 3 came twice")


def test_a_process_that_ends_by_itself_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(TrainingError, match="the coordinator ended by itself with exit code 40") as ended:
        run_chaos_demo(Settings(nodes=1, name="taken", runs=str(tmp_path), log="silent"))
    assert ended.value.code == "W5-313"
    assert "there is a run named taken already" in ended.value.why
    assert str(tmp_path / "taken.chaos") in ended.value.fix


def test_nobody_outlives_the_pool_when_it_is_told_to_go(tmp_path: Path) -> None:
    pool = ChaosPool(tmp_path / "left", Settings(epochs=1, runs=str(tmp_path)), print, start=start)
    pids: list[int] = []

    def be_told_to_go() -> None:
        with pool.open():
            pool.freeze(pool.add_node(), seconds=60.0)
            pids.extend(child.process.pid for child in pool.children if child.process is not None)
            signal.raise_signal(signal.SIGTERM)
            pool.wait(60.0)

    with pytest.raises(KeyboardInterrupt):
        be_told_to_go()
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
