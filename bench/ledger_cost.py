"""What the ledger costs on the first system's benchmark: on and off in turns of half a second, in one run.

    python bench/ledger_cost.py [async|sync] [seconds]

Machines are noisy and drift, so each turn is compared with the one after it. While it is off the ledger has
holes: the run is thrown away, and its last checkpoint with it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import w5xde
from w5xde.api import Watcher, run_coordinator
from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.runtime.coordinator.body import Coordinator
from w5xde.runtime.telemetry.status import RunStatus

JOB = Path(__file__).parents[1] / "examples" / "seed_mlp.py"
NODES = 10
WARM_UP_SECONDS = 3.0
TURN_SECONDS = 0.5


class Switch(Watcher, w5xde.Callback):
    """Turns the ledger off and on again, and counts what was done in each turn."""

    def __init__(self) -> None:
        self.rates: dict[bool, list[float]] = {True: [], False: []}
        self._is_on = True
        self._since: tuple[float, int] | None = None
        self._until = 0.0

    def started(self, coordinator: Coordinator, settings: Settings, job_name: str) -> None:
        self._journal = coordinator._journal

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        now = time.perf_counter()
        if self._since is None:
            self._since, self._until = (now, run.batches), now + WARM_UP_SECONDS
        if now < self._until:
            return
        then, before = self._since
        if self._until - then < WARM_UP_SECONDS:
            self.rates[self._is_on].append((run.batches - before) / (now - then))
        self._since, self._until = (now, run.batches), now + TURN_SECONDS
        self._is_on = not self._is_on
        self._journal.__dict__.pop("saw", None)
        self._journal.__dict__.pop("tick", None)
        if not self._is_on:
            self._journal.__dict__ |= {"saw": self._see, "tick": lambda now: None}

    def _see(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Only what the scribe must know to be turned on again."""
        steps = self._journal._scribe._steps
        steps.update({effect.plan.index: effect for effect in effects if isinstance(effect, ev.Step)})
        if isinstance(event, ev.Stepped):
            steps.pop(event.step, None)


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else "async"
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 45.0
    switch = Switch()
    with tempfile.TemporaryDirectory() as runs:
        settings = Settings(
            mode=mode,  # type: ignore[arg-type]
            batches_per_step=32 if mode == "sync" else None,
            nodes=NODES,
            seconds=seconds,
            runs=runs,
            log="silent",
        )
        run_coordinator(str(JOB), settings, [switch], switch)
    on, off = switch.rates[True], switch.rates[False]
    pairs = [a / b for a, b in zip(on, off, strict=False)]
    print(
        f"{mode}: {statistics.mean(on):.0f} batches/s with the ledger, {statistics.mean(off):.0f} without; "
        f"ratio of means {statistics.mean(on) / statistics.mean(off):.3f}, "
        f"median of {len(pairs)} pairs {statistics.median(pairs):.3f}"
    )


if __name__ == "__main__":
    main()
