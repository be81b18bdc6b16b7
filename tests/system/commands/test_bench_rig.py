"""The rig of slow links is built for real where that is allowed, and refused in plain words elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.commands.benches import run_benches
from w5xde.bench import jobs
from w5xde.bench.rig import namespaces
from w5xde.bench.rig.hosted import paced
from w5xde.bench.rig.namespaces import SlowLink, build_rig, require_rig
from w5xde.cli.main import main
from w5xde.errors import TrainingError, UsageError

# One rig at a time: its links must not wait for a core.
pytestmark = pytest.mark.xdist_group("bench-rig")
# A delay so long that a busy machine does not change it by a tenth.
RIG = ["links", "--rig", "--rates", "20", "--delay", "30", "--seeds", "1", "--params", "1e4"]
LEARNING = [*RIG, "--contestants", "ddp,diloco-20,ours-sync", "--budget", "60", "--patience", "20"]
BUSY = [*RIG, "--utilisation", "--contestants", "powersgd-1,local-8,ours-sync", "--seconds", "1"]


def can_build() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and Path("/dev/net/tun").exists()


def our_namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return re.findall(rf"w5xde-{os.getpid()}-\S+", done.stdout)


def assert_refused(words: list[str], shown: Callable[[], str]) -> None:
    assert main(["bench", *words]) == 2
    said = shown()
    assert "the rig of slow links cannot be built here" in said
    assert re.search(r"root|iproute2|Linux|tun", said)


def test_contestants_learn_over_real_links_or_the_rig_is_refused(tmp_path, capsys):
    if not can_build():
        assert_refused(LEARNING, lambda: capsys.readouterr().err)
        return
    found = run_benches({"rig": LEARNING}, tmp_path)["rig"]
    [link] = found["rows"]
    rates = link["check"]["up_mbit_per_second"] + link["check"]["down_mbit_per_second"]
    assert rates == [pytest.approx(20, rel=0.1)] * 4
    # From each node to the coordinator, and from one node to the other.
    assert link["check"]["delays_ms"] == [pytest.approx(30, rel=0.1)] * 3
    rows = {row["name"]: row for row in link["contestants"]}
    assert list(rows) == ["ddp", "diloco-20", "ours-sync"]
    for name, row in rows.items():
        seconds, samples, losses, moved = zip(*link["curves"][name], strict=True)
        assert list(seconds) == sorted(seconds)
        assert list(moved) == sorted(moved)
        assert losses[-1] < losses[0]
        assert samples[-1] >= 32
        assert 0 < row["utilisation"]["median"] < 1
    # A step of DDP is two batches of 16; each node sends the gradient once and receives it once.
    gradients = 2 * 2 * 4 * found["parameters"] / 32
    assert gradients < rows["ddp"]["bytes_per_sample"]["median"] < 1.5 * gradients
    assert rows["diloco-20"]["bytes_per_sample"]["median"] < gradients / 5
    assert rows["ours-sync"]["bytes_per_sample"]["median"] > gradients / 2


def test_paced_nodes_are_never_busier_than_their_pace_or_the_rig_is_refused(tmp_path, capsys):
    words = [*BUSY, "--paced", "50"]
    if not can_build():
        assert_refused(words, lambda: capsys.readouterr().err)
        return
    found = run_benches({"utilisation": words}, tmp_path)["utilisation"]
    [link] = found["rows"]
    assert found["paced_seconds"] == pytest.approx(0.05)
    for row in link["contestants"]:
        assert 0 < row["utilisation"]["median"] <= 1.05
        # Two nodes with batches of 16.
        assert row["samples_per_second"]["median"] <= 1.05 * 2 * 16 / 0.05


def test_nothing_is_left_of_a_rig_whose_hosts_fail():
    if not can_build():
        with pytest.raises(UsageError):
            require_rig()
        return
    rig = build_rig(2, SlowLink(10, 1), "w5xde.bench.rig.nowhere")
    with pytest.raises(TrainingError, match="has ended"), rig:
        pytest.fail("its hosts run no module")
    assert our_namespaces() == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"geteuid": lambda: 1000}, "only root may make network namespaces"),
        ({"which": lambda tool: None}, "the commands ip and tc are missing"),
        ({"which": lambda tool: tool if tool == "ip" else None}, "the commands tc are missing"),
    ],
)
def test_what_is_missing_is_said_with_what_to_install(monkeypatch, changed, said):
    monkeypatch.setattr(namespaces.os, "geteuid", changed.get("geteuid", lambda: 0))
    monkeypatch.setattr(namespaces.shutil, "which", changed.get("which", lambda tool: tool))
    with pytest.raises(UsageError) as refused:
        require_rig()
    assert said in refused.value.why
    assert "leave out --rig" in refused.value.fix
    assert ("iproute2" in refused.value.fix) == ("missing" in said)


def test_a_paced_batch_takes_its_time_and_has_the_same_gradient():
    plain = jobs.split_text_job(1000)
    slow = paced(plain, 2, 0.05)
    model, batch = plain.model(), jobs.held_out_windows(2)
    gradients = []
    for job in (plain, slow, slow):
        model.zero_grad()
        began = time.monotonic()
        job.loss(model, batch).backward()
        seconds = time.monotonic() - began
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert seconds > 0.04
    assert all(a.equal(b) for a, b in zip(gradients[0], gradients[1], strict=True))
