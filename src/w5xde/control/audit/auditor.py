"""The audit: reads the records of a ledger in order and counts again, with no code of the ledger's writer.

Every batch of a complete epoch must have been applied in exactly one step that still counts. Every step must
use leases that the same life of the coordinator gave to those nodes, and that ended with an accepted answer.
A contradiction is a violation; other facts that a user should know are remarks. Knows no files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Any

from w5xde.control.audit.coverage import Coverage, joined
from w5xde.control.audit.findings import Findings
from w5xde.control.audit.lease_check import LeaseCheck
from w5xde.control.audit.records import (
    NAMED_MAX,
    STEP_BATCHES_MAX,
    AppliedStep,
    Record,
    named,
    steps_of,
    whole,
)
from w5xde.control.audit.weights_check import WeightsCheck
from w5xde.specs.round_lengths import RoundLengths

# Settings that a resumed run may change.
_LIMITS = ("epoch_limit", "step_limit")
# In rounds mode a run may choose how far they grow; records of this kind say so.
_LENGTHS = "round_lengths"


class Auditor:
    """Audits one ledger: call `read` with every record, then `close`."""

    def __init__(self) -> None:
        self._found = Findings()
        self._life = 0
        self._plan: Record = {}
        self._lengths: RoundLengths | None = None
        self._is_stopped = True
        leases = self._leases = LeaseCheck(self._wrong, self._found)
        # The steps that count; a step's index is the version it was applied to.
        self._steps: list[AppliedStep] = []
        weights = WeightsCheck(self._wrong, self._found, lambda: len(self._steps))
        self._applied: defaultdict[int, Coverage] = defaultdict(Coverage)
        self._aside: set[tuple[int, int]] = set()
        self._ever_aside: set[tuple[int, int]] = set()
        # Epoch -> its number of batches, once its last step is known.
        self._ends: dict[int, int] = {}
        # Epoch -> the version at which the ledger called it complete.
        self._complete: dict[int, int] = {}
        self._is_restored = True
        # Steps that the last restore undid, and that the step log may still replay.
        self._void = 0
        self._readers: dict[str, Callable[[Record], None]] = {
            "start": self._start,
            "restore": self._restore,
            "resumed": self._resumed,
            "joined": leases.joined,
            "left": leases.left,
            "lend": self._lend,
            "took": leases.took,
            "refused": leases.refused,
            "fenced": leases.fenced,
            "cancelled": leases.ended,
            "expired": leases.expired,
            "aside": self._set_aside,
            "step": self._step,
            "epoch": self._epoch,
            "round lengths": self._grow,
            "checkpoint": self._checkpoint,
            "evaluated": weights.measured,
            "model": weights.saved,
            "best": weights.kept_as_best,
            "override": weights.rate_changed,
            "stop": self._stop,
            "lost": lambda record: self._wrong(f"tells of a loss: {record['text']}"),
            "gap": lambda record: self._wrong("tells of a gap: the disk could not be written for too long"),
        }

    def read(self, record: Any) -> None:
        """Audit the next record. A malformed record is a violation; unknown kinds are for people."""
        self._found.records += 1
        if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
            self._wrong("is no record")
            return
        reader = self._readers.get(record["kind"])
        if reader is None:
            return
        try:
            if record["kind"] != "start" and not self._life:
                self._wrong("comes before any start")
            reader(record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
            self._wrong(f"is not a proper {record['kind']!r} record ({type(error).__name__}: {error})")

    def _wrong(self, what: str) -> None:
        self._found.violations.append(f"record {self._found.records} {what}")

    # --- lives ------------------------------------------------------------------------------------

    def _start(self, record: Record) -> None:
        # Numbers may be missing: a life that died before its first record was durable lent nothing.
        if record["incarnation"] <= self._life:
            self._wrong(f"starts life {record['incarnation']} after life {self._life}")
        if not self._is_stopped:
            self._found.crashes += 1
        self._life = record["incarnation"]
        self._found.life = self._life
        self._found.lives += 1
        plan = {key: value for key, value in record["plan"].items() if key not in _LIMITS}
        self._lengths = RoundLengths.parse(plan.pop(_LENGTHS)) if _LENGTHS in plan else None
        if self._plan and plan != self._plan:
            self._wrong(f"goes on by another plan: {plan}, not {self._plan}")
        if not 0 < whole(plan["step_batches"]) <= STEP_BATCHES_MAX or not whole(plan["batch_size"]):
            raise ValueError("a plan that nobody could follow")
        whole(plan["samples"] or 0)
        self._plan = plan
        self._is_stopped = False
        self._found.ended = ""
        self._is_restored = self._life == 1 and self._found.lives == 1
        self._leases.begin_life(self._life)

    def _restore(self, record: Record) -> None:
        version = whole(record["version"])
        if version > len(self._steps):
            self._wrong(f"restores version {version}, but only {len(self._steps)} steps are recorded")
        known = self._found.checkpoints.get(version)
        if known is not None and record["sha256"] != known:
            self._wrong(f"restores another checkpoint of version {version} than was written")
        self._void = max(0, len(self._steps) - version)
        self._found.steps_redone += self._void
        for epoch in {step.epoch for step in self._steps[version:]}:
            self._applied[epoch].forget_from(version)
        for step in self._steps[version:]:
            if step.ends_epoch:
                self._ends.pop(step.epoch, None)
        del self._steps[version:]
        # Newer ones are damaged; if they are not, `_begin_work` finds that durable steps were lost.
        self._found.checkpoints = {at: sha for at, sha in self._found.checkpoints.items() if at <= version}
        self._resumed(record)
        self._complete = {
            epoch: at
            for epoch, at in self._complete.items()
            if at <= version and self._is_still_complete(epoch)
        }
        damaged = record["damaged"]
        if damaged:
            self._found.remarks.append(
                f"life {self._life} found damaged checkpoints and took an older one: {', '.join(damaged)}"
            )
            self._found.durable_version = version
        self._is_restored = True

    def _resumed(self, record: Record) -> None:
        self._aside = _keys(record["aside"])
        if not self._aside <= self._ever_aside:
            self._wrong(f"calls {named(self._aside - self._ever_aside)} set aside, which never were")

    def _is_still_complete(self, epoch: int) -> bool:
        missing = self._missing(epoch)
        return missing is not None and missing <= self._aside_of(epoch)

    def _begin_work(self) -> None:
        """Check before the first lease or step of a life that it restored all durable steps."""
        if not self._is_restored:
            self._is_restored = True
            self._wrong("works without having restored anything")
        if len(self._steps) < self._found.durable_version:
            lost = self._found.durable_version - len(self._steps)
            self._wrong(f"works although {lost} durable steps were lost")
            self._found.durable_version = len(self._steps)

    def _checkpoint(self, record: Record) -> None:
        version = record["version"]
        if version > len(self._steps):
            self._wrong(f"calls version {version} durable, but only {len(self._steps)} steps are recorded")
        known = self._found.checkpoints.setdefault(version, record["sha256"])
        if known != record["sha256"] and version <= self._found.durable_version:
            self._wrong(f"writes version {version} again, and differently")
        self._found.checkpoints[version] = record["sha256"]
        self._found.durable_version = max(self._found.durable_version, version)

    def _stop(self, record: Record) -> None:
        self._is_stopped = True
        self._found.ended = record["error"] or record["reason"]
        if record["reason"] == "all steps done" and not record["error"]:
            self._require_no_holes()

    def _lend(self, record: Record) -> None:
        self._begin_work()
        self._leases.lent(record)

    # --- steps ------------------------------------------------------------------------------------

    def _set_aside(self, record: Record) -> None:
        key = whole(record["epoch"]), whole(record["batch"])
        self._aside.add(key)
        self._ever_aside.add(key)
        if "epoch_batches" in record:
            self._ends[record["epoch"]] = whole(record["epoch_batches"])

    def _step(self, record: Record) -> None:
        is_replayed = record.get("replayed", False)
        if not is_replayed:
            self._begin_work()
        if record["version"] != len(self._steps):
            self._wrong(f"applies a step to version {record['version']}, but {len(self._steps)} are recorded")
        steps = self._read_steps(record)
        if is_replayed:
            # The step log may hold more than the part of the ledger that was synced.
            self._aside = _keys(record["aside"])
            self._ever_aside |= self._aside
        else:
            for start, stop, node, number in steps[0].shares:
                self._leases.use(record["step"], start, stop, node, number)
        for step in steps:
            self._apply(step, is_apart=record.get("apart") is True)
            if is_replayed and self._void:
                self._void -= 1
                self._found.steps_redone -= 1
        if record.get("durable"):
            self._found.durable_version = max(self._found.durable_version, len(self._steps))

    def _read_steps(self, record: Record) -> list[AppliedStep]:
        """Return the steps of a `step` record: those of a round, else one, which may be a stretch."""
        steps = steps_of(record, self._plan["step_batches"])
        # A batch that is tried again after a restart is a round of its own, outside of the planned ones.
        planned = self._lengths.at(max(0, record["step"])) if self._lengths is not None else 0
        if "columns" in record and len(steps) > planned:
            self._wrong(f"applies a round of {len(steps)} steps where {planned} were planned")
        return steps

    def _grow(self, record: Record) -> None:
        self._lengths = RoundLengths.parse(record[_LENGTHS])

    def _apply(self, step: AppliedStep, *, is_apart: bool) -> None:
        """Count a step, or a stretch if `is_apart`."""
        self._require_planned(step)
        spans = joined((start, stop) for start, stop, _, _ in step.shares)
        aside = self._aside_in(step)
        if joined([*spans, *((i, i + 1) for i in aside)]) != [(0, step.count)]:
            self._wrong(f"applies batches {spans} of a step of {step.count}, with {named(aside)} set aside")
        version = len(self._steps)
        places = _applied_at(spans, version) if is_apart else [(*each, version) for each in spans]
        for start, stop, at in places:
            again = self._applied[step.epoch].add(step.first + start, step.first + stop, at)
            if again is not None:
                batch, before = again
                self._wrong(f"applies batch {batch} of epoch {step.epoch + 1} again, after version {before}")
        self._steps += step.split() if is_apart else [step]
        if step.ends_epoch:
            self._ends[step.epoch] = step.first + step.count

    def _require_planned(self, step: AppliedStep) -> None:
        samples, size = self._plan["samples"], self._plan["batch_size"]
        if samples is None:
            return
        # All batches have the same size; only the last of an epoch may be smaller.
        full = min(step.count, max(0, samples // size - step.first))
        rest = [(samples % size, 1)] * (step.count > full)
        planned = [each for each in [(size, full), *rest] if all(each)]
        if step.sizes != planned or sum(count for _, count in planned) != step.count:
            self._wrong(f"counts batches of {step.sizes} samples where {planned} were planned")
        if step.ends_epoch and (step.first + step.count) * size < samples:
            self._wrong(f"ends epoch {step.epoch + 1} before its last batch")

    # --- epochs -----------------------------------------------------------------------------------

    def _epoch(self, record: Record) -> None:
        epoch = whole(record["epoch"]) - 1
        if epoch in self._complete:
            self._wrong(f"calls epoch {epoch + 1} complete again")
        self._complete[epoch] = len(self._steps)
        missing = self._missing(epoch)
        allowed = self._aside_of(epoch).intersection(record["aside"])
        if missing is None:
            self._wrong(f"calls epoch {epoch + 1} complete, but its last batch was never applied")
        elif missing != allowed:
            self._wrong(f"calls epoch {epoch + 1} complete, but batches {named(missing)} never counted")

    def _missing(self, epoch: int) -> set[int] | None:
        """Return the batches of an epoch that no step applied; None if its number of batches is unknown.

        At most a few more than were set aside: any of those is a violation already.
        """
        count = self._ends.get(epoch)
        if self._plan["samples"] is not None:
            count = -(-self._plan["samples"] // self._plan["batch_size"])
        if count is None:
            return None
        return set(islice(self._applied[epoch].missing(count), len(self._aside) + NAMED_MAX))

    def _aside_of(self, epoch: int) -> set[int]:
        return {batch for of, batch in self._aside if of == epoch}

    def _aside_in(self, step: AppliedStep) -> set[int]:
        """Return the places of a step that are set aside, at the cost of the smaller of the two."""
        if len(self._aside) < step.count:
            places = {batch - step.first for batch in self._aside_of(step.epoch)}
            return {place for place in places if 0 <= place < step.count}
        return {i for i in range(step.count) if (step.epoch, step.first + i) in self._aside}

    def _require_no_holes(self) -> None:
        for epoch in sorted({step.epoch for step in self._steps} | {of for of, _ in self._aside}):
            if not self._applied[epoch].is_whole(self._aside_of(epoch)):
                self._wrong(f"ends the run with a hole in epoch {epoch + 1}")
            if epoch and epoch - 1 not in self._complete:
                self._wrong(f"ends the run, but epoch {epoch} was never complete")

    # --- the result ----------------------------------------------------------------------------------

    def close(self) -> Findings:
        """Return the findings after the last record."""
        found = self._found
        if not found.records:
            found.violations.append("the ledger is empty")
        found.crashes += not self._is_stopped
        found.steps = len(self._steps)
        found.epochs = len(self._complete)
        found.aside = sorted(self._aside)
        for step in self._steps:
            for start, stop, node, _ in step.shares:
                samples = step.samples(start, stop)
                share = found.node(node)
                share.batches += stop - start
                share.samples += samples
                found.batches += stop - start
                found.samples += samples
        return found


def _keys(pairs: list[list[int]]) -> set[tuple[int, int]]:
    return {(whole(epoch), whole(batch)) for epoch, batch in pairs}


def _applied_at(spans: list[tuple[int, int]], version: int) -> list[tuple[int, int, int]]:
    """Return (batch, next batch, version that it was applied to) for each batch of a stretch."""
    batches = [batch for start, stop in spans for batch in range(start, stop)]
    return [(batch, batch + 1, version + number) for number, batch in enumerate(batches)]
