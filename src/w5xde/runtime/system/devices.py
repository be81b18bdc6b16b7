"""The devices of this machine on which nodes compute. Knows nothing of what is computed.

Starts no driver of a device in this process, because the processes that it forks must start their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from w5xde.errors import UsageError
from w5xde.learn.model.device import DEVICE_FIX, choose_device

# The first word of an answer.
_FOUND, _REFUSED = "found", "refused"


def machine_devices(wanted: str) -> list[str]:
    """The devices that `--devices` names; for `auto` every GPU of this machine, or the CPU."""
    can_fork = hasattr(os, "fork")
    if torch.accelerator.current_accelerator() is None or not can_fork:
        return find_devices(wanted)
    # Looking for GPUs starts their driver, and a process that is forked afterwards could not use it.
    return in_child(lambda: find_devices(wanted))


def find_devices(wanted: str) -> list[str]:
    """As `machine_devices`, but in this process."""
    if wanted != "auto":
        return [_require(name.strip()) for name in wanted.split(",")]
    best = choose_device("auto")
    if best.type == "cpu":
        return ["cpu"]
    return [f"{best.type}:{number}" for number in range(torch.accelerator.device_count())]


def _require(name: str) -> str:
    device = choose_device(name)
    if device.type != "cpu" and (device.index or 0) >= torch.accelerator.device_count():
        raise UsageError(
            f"--devices {name}: this machine has {torch.accelerator.device_count()} of that kind",
            code="W5-301",
            fix=DEVICE_FIX,
        )
    return name if name != "auto" else str(device)


def in_child(find: Callable[[], list[str]]) -> list[str]:
    """Call a function in a fork of this process, and return its answer or raise its UsageError."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(find, writing)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as answers:
        kind, _, text = answers.read().partition("\n")
    os.waitpid(pid, 0)
    if kind != _FOUND:
        what = text if kind == _REFUSED else "torch cannot look for the devices of this machine"
        raise UsageError(what, code="W5-301", fix=DEVICE_FIX)
    return text.split("\n")


def _answer(find: Callable[[], list[str]], writing: int) -> None:
    """In the fork: write the answer, and end without running anything of the process it was forked from."""
    try:
        try:
            text = "\n".join([_FOUND, *find()])
        except UsageError as error:
            text = f"{_REFUSED}\n{error.what}"
        os.write(writing, text.encode())
    finally:
        os._exit(0)
