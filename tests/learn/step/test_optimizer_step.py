"""Torch's compiler is not loaded, and optimizers step as they do with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

from tests.processes import run_python
from w5xde.learn.step import flat_steps

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "Adadelta": optim.Adadelta,
}


def trained(make: Any, step: Any) -> tuple[bytes, dict[str, Any]]:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        step(optimizer)
    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    return weights.numpy().tobytes(), optimizer.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_without_the_compiler_is_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(OPTIMIZERS[name], lambda optimizer: optimizer.step())
    monkeypatch.setattr(flat_steps, "compiler_is_loaded", lambda: False)
    weights, state = trained(OPTIMIZERS[name], flat_steps.step)
    assert weights == expected[0]
    assert str(state) == str(expected[1])


def test_hooks_are_called_and_a_schedule_is_content(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(flat_steps, "compiler_is_loaded", lambda: False)
    optimizer = optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = StepLR(optimizer, 1)
    flat_steps.step(optimizer)
    schedule.step()
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    flat_steps.step(optimizer)
    assert called == ["after"]


def test_a_step_that_somebody_patched_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_steps, "compiler_is_loaded", lambda: False)
    optimizer = optim.Adagrad(nn.Linear(2, 2).parameters())
    called = []
    monkeypatch.setattr(optimizer, "step", lambda: called.append("patched"))
    flat_steps.step(optimizer)
    assert called == ["patched"]


def test_a_training_does_not_load_the_compiler(tmp_path: Path) -> None:
    script = (
        "import sys, w5xde; from tests.processes import JOBS\n"
        "settings = dict(nodes=1, epochs=2, checkpoint_every='5steps')\n"
        f"w5xde.train(f'{{JOBS}}:job', runs={str(tmp_path)!r}, **settings)\n"
        "sys.exit('torch._dynamo' in sys.modules or 'sympy' in sys.modules)"
    )
    done = run_python("-c", script)
    assert done.returncode == 0, done.stderr
