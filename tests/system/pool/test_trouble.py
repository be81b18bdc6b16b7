"""What goes wrong shows at the line that called; a pool leaves nothing behind, however its script ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

import w5xde
from tests.processes import ROOT, environment, wait_until
from tests.system.pool.nodes import nodes, processes
from tests.system.pool.scripts import classify


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1).remainder(3).floor().long()


def touchy(model: nn.Module, part: Any) -> Tensor:
    """Fails, or is not a number, if a row says so."""
    inputs, labels = part
    if bool((inputs > 100).any()):
        raise RuntimeError("a sensor is broken")
    loss = classify(model, (inputs, labels))
    return loss * float("nan") if bool((inputs < -100).any()) else loss


def spoiled(value: float) -> tuple[Tensor, Tensor]:
    inputs, labels = batch()
    inputs[5, 2] = value
    return inputs, labels


@pytest.mark.parametrize(
    ("value", "said"), [(1e6, "a sensor is broken"), (-1e6, "the loss of part 2 is nan")]
)
@pytest.mark.parametrize("count", [1, 3])
def test_a_loss_that_fails_on_nodes_raises_at_the_callers_line_and_the_pool_goes_on(
    count: int, value: float, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = small_model()
    with w5xde.Pool(model, losses={"touchy": touchy}, nodes=count) as pool:
        good = pool.backward(batch(), parts=4)
        before = {name: each.grad.clone() for name, each in model.named_parameters()}
        buffers = {name: each.clone() for name, each in model.named_buffers()}
        for _ in range(3):
            with pytest.raises(w5xde.TrainingError) as failed:
                pool.backward(spoiled(value), parts=4)
            assert failed.value.code == "W5-276"
            assert said in failed.value.what
            assert failed.traceback[0].path == Path(__file__)
        # Nothing of the call was added, and the next one starts from there.
        assert all(torch.equal(each.grad, before[name]) for name, each in model.named_parameters())
        assert all(torch.equal(each, buffers[name]) for name, each in model.named_buffers())
        model.zero_grad()
        assert pool.backward(batch(), parts=4) == pytest.approx(good)
        # The last of them may be starting still.
        wait_until(lambda: len(pool.nodes) == count, lambda: str(pool.nodes))
    assert "could not compute part 2 of call 2: " in capfd.readouterr().err


def test_a_loss_that_fails_at_once_raises_before_any_node_computes() -> None:
    with w5xde.Pool(small_model(), losses={"touchy": touchy, "other": classify}, nodes=1) as pool:
        with pytest.raises(w5xde.JobError) as failed:
            pool.backward(spoiled(1e6), "touchy", parts=1)
        assert failed.value.code == "W5-205"
        assert "a sensor is broken (test_trouble.py, line" in failed.value.why
        assert isinstance(failed.value.__cause__, RuntimeError)
        pool.backward(batch(), "other", parts=2)
        with pytest.raises(w5xde.JobError, match="the loss failed on the first batch"):
            pool.backward(spoiled(1e6), "touchy", parts=1)
        pool.backward(batch(), "touchy", parts=2)


def test_a_call_that_is_given_up_adds_nothing_and_the_next_one_is_computed() -> None:
    model = small_model()
    # The next call must not see weights of before: they change while no version does.
    with w5xde.Pool(model, losses={"loss": classify}, nodes=1) as pool:
        pool.backward(batch(), parts=2)
        model.zero_grad()
        node = nodes()[0]
        node.suspend()
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.backward(batch(), parts=2)
        node.resume()
        assert all(each.grad is None for each in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        found = pool.backward(batch(), parts=1)
    expected = classify(model, batch()).detach()
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


# --- the end -------------------------------------------------------------------------------------------


def folders() -> set[str]:
    return {each.name for each in Path("/tmp").glob("w5xde-pool-*")}


@pytest.mark.parametrize("how", ["in order", "by an error", "before its first call"])
def test_a_pool_that_ends_leaves_no_process_thread_or_folder(how: str) -> None:
    before, threads = folders(), set(threading.enumerate())
    begun = {each.pid for each in processes()}
    pool = w5xde.Pool(small_model(), losses={"loss": classify}, nodes=2)
    with suppress(ZeroDivisionError), pool:
        if how != "before its first call":
            pool.backward(batch(), parts=2)
            assert {each.pid for each in nodes()} - begun
        if how == "by an error":
            raise ZeroDivisionError
    assert {each.pid for each in processes()} == begun
    wait_until(lambda: set(threading.enumerate()) <= threads, lambda: str(threading.enumerate()))
    wait_until(lambda: folders() <= before, lambda: f"{folders() - before} are left")
    with pytest.raises(w5xde.UsageError) as refused:
        pool.backward(batch(), parts=2)
    assert refused.value.code == "W5-277"


SCRIPT = """
import sys, time, torch
from tests.system.pool.test_trouble import small_model, batch
from tests.system.pool.scripts import classify
import w5xde
torch.set_num_threads(1)
pool = w5xde.Pool(small_model(), losses={"loss": classify}, nodes=2, log="silent")
pool.__enter__()
pool.backward(batch(), parts=2)
print("ready", flush=True)
if sys.argv[1] == "wait":
    while True:
        pool.backward(batch(), parts=2)
"""


def run_script(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )


@pytest.mark.parametrize("how", ["killed", "interrupted", "never closed"])
def test_no_process_outlives_its_script(how: str) -> None:
    running = run_script("end" if how == "never closed" else "wait")
    try:
        family: list[psutil.Process] = []
        if how != "never closed":
            assert running.stdout is not None
            assert running.stdout.readline() == "ready\n"
            family = psutil.Process(running.pid).children(recursive=True)
            assert len(family) == 4  # the guard, the fork server and two nodes
            running.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    wait_until(lambda: not any(each.is_running() for each in family), lambda: f"{family} are left")
    if how == "interrupted":
        assert running.returncode == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
    if how == "never closed":
        assert (running.returncode, errors) == (0, "")


def test_a_pool_ends_with_an_error_if_no_local_node_can_stay() -> None:
    def leaves(model: nn.Module, part: Any) -> Tensor:
        if os.getpid() != owner:
            os._exit(3)
        return classify(model, part)

    owner = os.getpid()
    with w5xde.Pool(small_model(), losses={"leaves": leaves}, nodes=2, canary=False, log="silent") as pool:
        for _ in range(2):
            with pytest.raises(w5xde.TrainingError) as ended:
                pool.backward(batch(), parts=2)
            assert ended.value.code == "W5-279"
            assert "every local node has ended" in ended.value.what


def test_a_call_that_is_refused_takes_no_number_and_the_next_one_is_computed() -> None:
    """The number of a call decides the seeds of its parts, and is the core's own."""

    def drawing(model: nn.Module, part: Any) -> Tensor:
        return classify(model, part) * (1 + torch.rand(()))

    found = []
    for refused in (False, True):
        model = small_model()
        with w5xde.Pool(model, losses={"drawing": drawing}, nodes=1) as pool:
            pool.backward(batch(), parts=2)
            if refused:
                kept, model[0].weight = model[0].weight, nn.Parameter(torch.zeros(8, 6))
                with pytest.raises(w5xde.JobError, match="is another tensor"):
                    pool.backward(batch(), parts=2)
                model[0].weight = kept
            found.append(pool.backward(batch(), parts=2))
    assert found[0] == found[1]
