"""The records of the ledger: turns the core's events and effects into them, so that an audit can count again.

    start     a coordinator started: the run, the number of its life, its plan
    lost      a part of the ledger, or of what it proves, is missing
    restore   the run continues from a checkpoint; steps of earlier lives beyond that version are void
    resumed   everything is restored; batches that are still set aside (the others are tried again)
    override  the user changed the learning rate: after which step, and the rates before and after
    joined, left, …       notes, in words, with their facts
    lend      leases given to a node: [lease, step, first batch within the step, one past its last];
              `ahead`: by how many updates its parameters look ahead of the version, if not 0;
              `validates`: batches of the validation set, on the weights of that step
    took      an update was accepted; left out if the `step` that uses it is written at once
    refused   an answer was rejected, and why; its lease is over
    fenced    an answer to a lease that was not outstanding at that node; it changed nothing
    cancelled, expired    leases that ended without an answer
    aside     a batch that failed on every node that tried it
    step      the learner applied a step: its batches and shares ([start, stop, node, lease] each);
              `apart`: each batch as a step of its own; `rate`: the factor on its learning rate, if not 1;
              `columns`: a round of so many columns, which shares and leases count instead of batches
    banned    a node that may not come back, and why
    undo      a step begins again: it would have made the model non-finite, or used a banned node's update
    checkpoint            a checkpoint is durable: its version and hash
    evaluated an evaluation has ended: its metrics, and the step and epoch of the weights that it measured
    model     model.safetensors is about to be written: after how many steps, and the hash of the file
    best      best.safetensors is about to be written: of which step, the hash of the file, metric and value
    stop      the end, and why
    gap       (of the ledger's writer) the disk failed for so long that records were dropped

Knows no files and no clock. `control/audit/auditor.py` reads records without using this module.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from w5xde.control import events as ev
from w5xde.control.steps.plan import StepPlan

Record = dict[str, Any]


class RecordBuilder:
    """Builds records from events and effects, and keeps them until `drain`."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._steps: dict[int, ev.Step] = {}
        self._taken: dict[int, str] = {}

    def saw(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        """Record that the core handled `event` and decided `effects`."""
        if isinstance(event, ev.Stepped):
            for step in event.steps:
                self._applied(self._steps.pop(step), durable=event.durable)
        for effect in effects:
            match effect:
                case ev.Assign():
                    self._lent(effect)
                case ev.Fold() | ev.KeepMeasures():
                    self._taken[effect.lease.id] = effect.lease.node
                case ev.Step():
                    self._steps[effect.plan.index] = effect
                case ev.Reject():
                    kind = "fenced" if effect.fenced else "refused"
                    facts = {"node": effect.node, "lease": effect.lease, "reason": effect.reason}
                    self.add({"kind": kind, **facts})
                case ev.CancelLeases():
                    self.add({"kind": "cancelled", "node": effect.node, "leases": effect.leases})
                case ev.Expire():
                    facts = {"node": effect.node, "leases": effect.leases, "reason": effect.reason}
                    self.add({"kind": "expired", **facts})
                case ev.SetAside():
                    self._set_aside(effect)
                case ev.Reopen():
                    self._steps.pop(effect.plan.index, None)
                    self.add({"kind": "undo", "step": effect.plan.index, "version": effect.version})
                case ev.Ban():
                    self.add({"kind": "banned", "node": effect.node, "reason": effect.reason})
                case ev.Note():
                    self.add({"kind": effect.kind, "text": effect.text, **effect.facts})

    def _lent(self, effect: ev.Assign) -> None:
        first = effect.leases[0]
        # The usual values are left out.
        unusual: Record = {"ahead": first.ahead} if first.ahead else {}
        unusual |= {"validates": True} if first.step.validates else {}
        leases = [
            [x.id, x.version if x.step.validates else x.step.index, x.span.start, x.span.stop]
            for x in effect.leases
        ]
        facts = {"node": effect.node, "version": first.version, **unusual, "leases": leases}
        self.add({"kind": "lend", **facts})

    def _applied(self, step: ev.Step, *, durable: bool) -> None:
        """Record an applied step; its leases need no `took` records."""
        for _, _, _, lease in step.shares:
            self._taken.pop(lease, None)
        # The usual values are left out: these are the longest and most frequent records.
        self.add(record_of(step) | ({"durable": True} if durable else {}))

    def _set_aside(self, effect: ev.SetAside) -> None:
        plan = effect.plan
        # If no batch of its step is ever applied, no other record says where the epoch ends.
        ends = {"epoch_batches": plan.first + len(plan.sizes)} if plan.ends_epoch else {}
        for i in plan.places(effect.span):
            record = {"kind": "aside", "step": plan.index, "epoch": plan.epoch, "batch": plan.first + i}
            facts = {"samples": plan.sizes[i], "reason": effect.reason, "nodes": effect.nodes}
            self.add(record | facts | ends)

    def add(self, record: Record) -> None:
        self._records.append(record)

    def drain(self) -> list[Record]:
        """Return the records since the last call."""
        for node in dict.fromkeys(self._taken.values()):
            leases = [lease for lease, whose in self._taken.items() if whose == node]
            self.add({"kind": "took", "node": node, "leases": leases})
        self._taken.clear()
        records, self._records = self._records, []
        return records


def record_of(step: ev.Step) -> Record:
    """Return the `step` record of a step."""
    plan = step.plan
    # The usual values are left out.
    unusual = ({"apart": True} if plan.apart else {}) | ({"rate": step.rate} if step.rate != 1.0 else {})
    unusual |= {"columns": plan.columns} if plan.columns else {}
    return unusual | {
        "kind": "step",
        "step": plan.index,
        "version": step.version,
        "epoch": plan.epoch,
        "first": plan.first,
        "sizes": [[size, len(list(same))] for size, same in groupby(plan.sizes)],
        "ends_epoch": plan.ends_epoch,
        "shares": step.shares,
    }


def step_of(record: Record) -> ev.Step:
    """Return the step of a `step` record."""
    sizes = tuple(size for size, count in record["sizes"] for _ in range(count))
    place = record["step"], record["epoch"], record["first"]
    form = record.get("apart", False), record.get("columns", 0)
    plan = StepPlan(*place, sizes, record["ends_epoch"], *form)
    shares = [tuple(share) for share in record["shares"]]
    return ev.Step(plan, record["version"], shares, float(record.get("rate", 1.0)))
