"""How a run that is interrupted twice ends: what it says of its model is true."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import PATIENCE_SECONDS
from w5xde.config import Settings
from w5xde.runtime.coordinator.ending import Ending, RunEnd
from w5xde.runtime.system.actor import Actor


class Writing:
    """A run folder that writes a model when it may."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def save_model(self, pieces: Any, record: Any) -> None:
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE_SECONDS)


def ending(folder: Writing, writer: Actor, said: list[str]) -> Ending:
    learner = SimpleNamespace(
        is_whole=True, version=3, flat=SimpleNamespace(module=None), weights_sha256=lambda: "ab"
    )
    journal = SimpleNamespace(
        store=SimpleNamespace(last_good="there is no checkpoint"), stop=lambda row: None
    )
    return Ending(learner, journal, folder, writer, Settings(checkpoint_every="off"), said.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_model_that_is_whole_in_time_is_not_said_to_be_missing(
    is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w5xde.runtime.coordinator.ending.model_pieces", lambda module: [])
    said: list[str] = []
    folder = Writing()

    async def end() -> None:
        writer, learner = Actor("writer", _raise, inline=False), Actor("learner", _raise, inline=True)
        run = ending(folder, writer, said)
        cut: Any = SimpleNamespace(progress=SimpleNamespace(epochs=1), version=3)
        saving = asyncio.ensure_future(run.save(cut, {}))
        await asyncio.to_thread(folder.begun.wait, PATIENCE_SECONDS)
        # The second interrupt cancels what the first began.
        saving.cancel()
        if is_in_time:
            asyncio.get_running_loop().call_later(0.05, folder.may_go_on.set)
            await run.abandon(learner, RunEnd())
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.abandon(learner, RunEnd()), 0.1)
            folder.may_go_on.set()
        writer.stop(cancels=False)

    asyncio.run(end())
    assert said == ([] if is_in_time else ["no model is saved; there is no checkpoint"])


def _raise(error: BaseException) -> None:
    raise error
