"""Honest runs: what the real core and scribe write down of a run in one life or several.

Driven as the coordinator drives them, without sockets, tensors or clocks: whoever was lent something first is
done with it first, and what the learner is asked for is done at once.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.ledger_records import Record, RecordBuilder
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import Plan
from w5xde.runtime.durable.resume import Replayed, Restored

BATCH_SECONDS = 0.1
# An epoch is 7 batches: steps of 3, 3 and 1.
SAMPLES, SIZE, STEP, EPOCHS, STEPS = 14, 2, 3, 2, 6


class Story:
    """A run in several lives, driven as the coordinator drives its core, and all that is written of it."""

    def __init__(self, mode: str = "sync", *, stream: bool = False, poison: int | None = None, **more: Any):
        self.records: list[Record] = []
        self.cuts: dict[int, Cut] = {}
        self.steps: list[tuple[ev.Step, Cut]] = []
        self._mode, self._is_stream, self._poison = mode, stream, poison
        self._settings = CoreSettings(mode=mode, **({"save_steps": 2} | more))
        self._life = 0
        self._now = 0.0

    def live(self, *nodes: str, steps: int = 99, version: int | None = None, replay: int = 0) -> Story:
        """Another life: from a checkpoint and the log, if there was one, until this many steps or the end."""
        self._life += 1
        # Both are None in the first life: everything begins anew.
        cut = self.cuts.get(version) if version is not None else None
        again = self.steps[version : version + replay] if version is not None else []
        if again:
            cut = again[-1][1]
        plan = Plan(
            step_batches=STEP,
            epoch_limit=EPOCHS,
            step_limit=None,
            samples=None if self._is_stream else SAMPLES,
            batch_size=SIZE,
        )
        self._core = CoordinatorCore(plan, replace(self._settings, incarnation=self._life), cut)
        facts = plan.facts | {"mode": self._mode}
        self.records.append({"kind": "start", "incarnation": self._life, "plan": facts})
        if version is not None:
            self._restored(version, again)
        del self.steps[self._core.view.version :]
        self._scribe, self._pending = RecordBuilder(), deque[Lease]()
        self._finish: ev.Finish | None = None
        self._tell(ev.Ticked(), *(ev.Joined(node) for node in nodes))
        if self._is_stream:
            start = plan.cursor
            for epoch in range(start.epoch, EPOCHS):
                batches = 7 - (start.first if epoch == start.epoch else 0)
                self._tell(*(ev.Discovered(epoch, SIZE) for _ in range(batches)), ev.Discovered(epoch, 0))
        while self._finish is None and len(self.steps) < steps:
            self._work()
        self.records += self._scribe.drain()
        if self._finish is not None:
            ended = {"reason": self._finish.reason, "error": self._finish.error}
            self.records.append({"kind": "stop", **ended})
        return self

    def _restored(self, version: int, again: list[tuple[ev.Step, Cut]]) -> None:
        checkpoint = self.cuts[version]
        accounts = [cut.accounts for cut in (checkpoint, *(cut for _, cut in again))]
        replayed = [
            Replayed(step, 0.0, after.aside, after.completed_since(before))
            for (step, _), before, after in zip(again, accounts, accounts[1:], strict=False)
        ]
        restored = Restored(
            version=version,
            sha256=f"hash of {version}",
            aside=checkpoint.accounts.aside,
            replayed=replayed,
        )
        self.records += copy.deepcopy(restored.records(self._core.view.accounts.aside))

    def _work(self) -> None:
        """Whoever was lent something first is done, or fails; or else time passes."""
        self._now += BATCH_SECONDS
        if not self._pending:
            self._tell(ev.Ticked(heard={member.name: self._now for member in self._core.view.members}))
            return
        lease = self._pending.popleft()
        batches = range(lease.step.first + lease.span.start, lease.step.first + lease.span.stop)
        if lease.step.epoch == 0 and self._poison in batches:
            self._tell(ev.Failed(lease.node, lease.id, "it is poisoned"))
        else:
            self._tell(ev.Answered(lease.node, [lease.id], BATCH_SECONDS))

    def _tell(self, *events: ev.Event) -> None:
        waiting = deque(events)
        while waiting:
            event = waiting.popleft()
            effects = self._core.handle(event, self._now)
            self._scribe.saw(event, effects)
            for effect in effects:
                waiting += self._perform(effect)

    def _perform(self, effect: ev.Effect) -> list[ev.Event]:
        match effect:
            case ev.Assign():
                self._pending += effect.leases
            case ev.Cancel():
                self._pending = deque(each for each in self._pending if each.id not in effect.leases)
                return [ev.Dropped(effect.node, lease) for lease in effect.leases]
            case ev.Step():
                self.steps.append((effect, self._core.view.cut(self._now)))
                return [ev.Stepped([effect.plan.index], durable=self._settings.logs_steps)]
            case ev.Save():
                self.cuts[effect.cut.version] = effect.cut
                version, steps = effect.cut.version, effect.cut.progress.steps
                sha256 = f"hash of {version}"
                self._scribe.add({"kind": "checkpoint", "version": version, "sha256": sha256})
                return [ev.Saved(steps)]
            case ev.Finish():
                self._finish = effect
        return []

    def leave(self, node: str) -> None:
        self._tell(ev.Left(node, "gone"))


def two_lives(mode: str = "sync") -> Story:
    """Killed after five steps, restored from the fourth, and brought to its end."""
    return Story(mode).live("a", "b", steps=5).live("b", "c", version=4)


HONEST: dict[str, Callable[[], Story]] = {
    "sync": lambda: Story().live("a", "b"),
    "async": lambda: Story("async").live("a", "b", "c"),
    "a stream": lambda: Story(stream=True).live("a"),
    "an async stream": lambda: Story("async", stream=True).live("a", "b"),
    "restored": two_lives,
    "async restored": lambda: two_lives("async"),
    "a stream restored": lambda: Story(stream=True).live("a", steps=5).live("a", version=4),
    "killed in every life": lambda: (
        Story()
        .live("a", steps=3)
        .live("a", steps=3, version=2)
        .live("b", steps=4, version=2)
        .live("c", version=4)
    ),
    "killed before anything was durable": lambda: Story().live("a", steps=1).live("b", version=0),
    "replayed": lambda: Story(logs_steps=True).live("a", "b", steps=5).live("c", version=2, replay=3),
    "replayed beyond an epoch": lambda: (
        Story(logs_steps=True, save_steps=99).live("a", steps=5).live("c", version=0, replay=5)
    ),
    "async replayed": lambda: (
        Story("async", logs_steps=True).live("a", "b", steps=5).live("c", version=4, replay=1)
    ),
    "aside with skip": lambda: Story(poison=4, skip_bad_batches=True).live("a", "b"),
    "aside with skip, async": lambda: Story("async", poison=1, skip_bad_batches=True).live("a", "b"),
    "aside with skip, restored": lambda: (
        Story(poison=1, skip_bad_batches=True).live("a", "b", steps=3).live("b", version=2)
    ),
    "aside with skip, replayed": lambda: (
        Story(poison=1, skip_bad_batches=True, logs_steps=True, save_steps=99)
        .live("a", "b", steps=4)
        .live("b", version=0, replay=4)
    ),
    # The last batch of an epoch is a step of its own.
    "a whole step aside": lambda: Story(poison=6, skip_bad_batches=True).live("a", "b"),
    "a whole step aside, async": lambda: Story("async", poison=6, skip_bad_batches=True).live("a", "b"),
    "a whole step aside in a stream": lambda: Story(stream=True, poison=6, skip_bad_batches=True).live(
        "a", "b"
    ),
    "a whole step aside, restored": lambda: (
        Story(poison=6, skip_bad_batches=True).live("a", "b", steps=3).live("b", version=2)
    ),
    "a whole step aside, replayed": lambda: (
        Story(poison=6, skip_bad_batches=True, logs_steps=True, save_steps=99)
        .live("a", "b", steps=4)
        .live("b", version=0, replay=4)
    ),
    "a whole step aside, replayed after it": lambda: (
        Story(poison=6, skip_bad_batches=True, logs_steps=True)
        .live("a", "b", steps=4)
        .live("b", version=2, replay=2)
    ),
}
