"""Honest runs: what the real core and scribe write down of a run in one life or several.

The driver of these tests drives the core. Knows no sockets, tensors or clocks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from tests.control.driver import Driver
from w5xde.control import events as ev
from w5xde.control.ledger_records import Record, RecordBuilder
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.cut import Cut
from w5xde.control.steps.plan import Plan
from w5xde.runtime.durable.resume import Replayed, Restored

# An epoch is 7 batches: steps of 3, 3 and 1.
SAMPLES, SIZE, STEP, EPOCHS, STEPS = 14, 2, 3, 2, 6


class Life(Driver):
    """One life of a run: writes its records, and tells the story which steps and checkpoints it made."""

    def __init__(self, story: Story, plan: Plan, settings: CoreSettings, cut: Cut | None) -> None:
        super().__init__(plan, settings, cut)
        self.node = self._compute
        self.scribe = RecordBuilder()
        self._story = story

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        effects = super().handle(event)
        self.scribe.saw(event, effects)
        return effects

    def perform(self, effect: ev.Effect) -> list[ev.Event]:
        match effect:
            case ev.Step():
                self._story.steps.append((effect, self.core.view.cut(self.now)))
            case ev.Save(cut):
                self._story.cuts[cut.version] = cut
                facts = {"version": cut.version, "sha256": f"hash of {cut.version}"}
                self.scribe.add({"kind": "checkpoint", **facts})
        return super().perform(effect)

    def _compute(self, work: ev.Assign) -> list[ev.Event]:
        """Fail the lease with the poisoned batch of the first epoch, and answer the others."""
        events: list[ev.Event] = []
        for lease in work.leases:
            first, span = lease.step.first, lease.span
            if lease.step.epoch == 0 and self._story.poison in range(first + span.start, first + span.stop):
                events.append(ev.Failed(work.node, lease.id, "it is poisoned"))
            else:
                events += self.answer(replace(work, leases=[lease]))
        return events


class Story:
    """A run in several lives, and all that is written of it."""

    life: Life

    def __init__(self, mode: str = "sync", *, stream: bool = False, poison: int | None = None, **more: Any):
        self.records: list[Record] = []
        self.cuts: dict[int, Cut] = {}
        self.steps: list[tuple[ev.Step, Cut]] = []
        self.poison = poison
        self._mode, self._is_stream = mode, stream
        self._settings = CoreSettings(mode=mode, incarnation=0, **({"save_steps": 2} | more))

    def live(self, *nodes: str, steps: int = 99, version: int | None = None, replay: int = 0) -> Story:
        """Another life: from a checkpoint and the log, if there was one, until this many steps or the end."""
        # Both are empty in the first life: everything begins anew.
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
        self._settings = replace(self._settings, incarnation=self._settings.incarnation + 1)
        life = self.life = Life(self, plan, self._settings, cut)
        facts = plan.facts | {"mode": self._mode}
        self.records.append({"kind": "start", "incarnation": self._settings.incarnation, "plan": facts})
        if version is not None:
            self._restored(version, again)
        del self.steps[life.core.view.version :]
        life.feed(ev.Ticked())
        life.join(*nodes)
        if self._is_stream:
            start = plan.cursor
            for epoch in range(start.epoch, EPOCHS):
                batches = 7 - (start.first if epoch == start.epoch else 0)
                life.feed(ev.Discovered(epoch, [*[SIZE] * batches, 0]))
        life.run(until=lambda: len(self.steps) >= steps)
        self.records += life.scribe.drain()
        if life.finish is not None:
            self.records.append({"kind": "stop", **asdict(life.finish)})
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
        self.records += copy.deepcopy(restored.records(self.life.core.view.accounts.aside))


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
