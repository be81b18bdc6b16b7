"""The audit: reads the records of a ledger, in order, and counts again. Uses nothing of what wrote them.

Every batch of an epoch that was called complete must have been applied in exactly one step that still
counts; every step must be made of leases that were given to those nodes, in that life of the coordinator,
and ended just so. What does not add up is a violation; what a user should know besides is a remark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from w5xde.control.audit.coverage import Counted, joined
from w5xde.control.audit.findings import Contribution, Findings
from w5xde.control.audit.records import NAMED_MAX, STEP_BATCHES_MAX, STRETCH_STEPS_MAX, Applied, named, whole

# The upper bits of a lease's number are the life of the coordinator that gave it.
_LIFE_SHIFT = 40
_LIMITS = ("epoch_limit", "step_limit")

Record = dict[str, Any]


@dataclass(slots=True)
class _Lease:
    node: str
    step: int
    start: int
    stop: int
    is_open: bool = True
    is_taken: bool = False


class Auditor:
    """`read` every record, then `close`."""

    def __init__(self) -> None:
        self._found = Findings()
        self._life = 0
        self._plan: Record = {}
        self._is_stopped = True
        self._members: set[str] = set()
        self._leases: dict[int, _Lease] = {}
        # What counts: place in this list is the version it was applied to.
        self._steps: list[Applied] = []
        self._applied: defaultdict[int, Counted] = defaultdict(Counted)
        self._aside: set[tuple[int, int]] = set()
        self._ever_aside: set[tuple[int, int]] = set()
        # Epoch -> how many batches it has, once its last step is known.
        self._ends: dict[int, int] = {}
        # Epoch -> the version at which it was called complete.
        self._complete: dict[int, int] = {}
        self._is_restored = True
        self._void = 0
        self._readers: dict[str, Callable[[Record], None]] = {
            "start": self._start,
            "restore": self._restore,
            "resumed": self._resumed,
            "joined": lambda record: self._members.add(record["node"]),
            "left": self._left,
            "lend": self._lend,
            "took": self._took,
            "refused": self._refused,
            "fenced": self._fenced,
            "cancelled": self._ended,
            "expired": self._expired,
            "aside": self._set_aside,
            "step": self._step,
            "epoch": self._epoch,
            "checkpoint": self._checkpoint,
            "model": self._model,
            "stop": self._stop,
            "gap": lambda record: self._wrong("tells of a gap: the disk could not be written for too long"),
        }

    def read(self, record: Any) -> None:
        """One record more. What nobody of ours wrote is a violation; unknown kinds are for people."""
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

    def _node(self, name: str) -> Contribution:
        return self._found.nodes.setdefault(name, Contribution())

    # --- lives ------------------------------------------------------------------------------------

    def _start(self, record: Record) -> None:
        # A life that died before its first word was written has no record, and lent nothing.
        if record["incarnation"] <= self._life:
            self._wrong(f"starts life {record['incarnation']} after life {self._life}")
        if not self._is_stopped:
            self._found.crashes += 1
        self._life = record["incarnation"]
        self._found.lives += 1
        plan = {key: value for key, value in record["plan"].items() if key not in _LIMITS}
        if self._plan and plan != self._plan:
            self._wrong(f"goes on by another plan: {plan}, not {self._plan}")
        if not 0 < whole(plan["step_batches"]) <= STEP_BATCHES_MAX or not whole(plan["batch_size"]):
            raise ValueError("a plan that nobody could follow")
        whole(plan["samples"] or 0)
        self._plan = plan
        self._is_stopped = False
        self._found.ended = ""
        self._is_restored = self._life == 1 and self._found.lives == 1
        self._members.clear()
        self._leases.clear()

    def _restore(self, record: Record) -> None:
        version = whole(record["version"])
        if version > len(self._steps):
            self._wrong(f"restores version {version}, but only {len(self._steps)} steps are recorded")
        known = self._found.checkpoints.get(version)
        if known is not None and record["sha256"] != known:
            self._wrong(f"restores another checkpoint of version {version} than was written")
        # Those that are replayed from a log, below, are not redone.
        self._void = max(0, len(self._steps) - version)
        self._found.steps_redone += self._void
        for epoch in {step.epoch for step in self._steps[version:]}:
            self._applied[epoch].forget_from(version)
        for step in self._steps[version:]:
            if step.ends_epoch:
                self._ends.pop(step.epoch, None)
        del self._steps[version:]
        # Newer ones are damaged, or the durable mark below tells that they should not have been passed over.
        known_until = {at: sha256 for at, sha256 in self._found.checkpoints.items() if at <= version}
        self._found.checkpoints = known_until
        self._aside = _keys(record["aside"])
        self._require_tried()
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
        self._require_tried()

    def _require_tried(self) -> None:
        if not self._aside <= self._ever_aside:
            self._wrong(f"calls {named(self._aside - self._ever_aside)} set aside, which never were")

    def _is_still_complete(self, epoch: int) -> bool:
        missing = self._missing(epoch)
        return missing is not None and missing <= self._aside_of(epoch)

    def _begins(self) -> None:
        """Work begins: whatever was to be restored is restored by now."""
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

    def _model(self, record: Record) -> None:
        version = whole(record["version"])
        if version > len(self._steps):
            self._wrong(f"saves a model of step {version}, but only {len(self._steps)} steps are recorded")
        self._found.models[str(record["sha256"])] = version

    def _stop(self, record: Record) -> None:
        self._is_stopped = True
        self._found.ended = record["error"] or record["reason"]
        if record["reason"] == "all steps done" and not record["error"]:
            self._require_no_holes()

    # --- leases -----------------------------------------------------------------------------------

    def _left(self, record: Record) -> None:
        if record["node"] not in self._members:
            self._wrong(f"lets {record['node']} leave, who was not there")
        self._members.discard(record["node"])

    def _lend(self, record: Record) -> None:
        self._begins()
        node = record["node"]
        if node not in self._members:
            self._wrong(f"lends to {node}, who is not there")
        for lease, step, start, stop in record["leases"]:
            if lease >> _LIFE_SHIFT != self._life or lease in self._leases:
                self._wrong(f"gives lease {lease} twice, or in the wrong life")
            self._leases[lease] = _Lease(node, step, start, stop)
            self._node(node).leases += 1

    def _take(self, number: int, node: str) -> _Lease | None:
        lease = self._leases.get(number)
        if lease is None or lease.node != node or not lease.is_open:
            self._wrong(f"accepts an answer of {node} to lease {number}, which is not outstanding there")
            return None
        lease.is_open, lease.is_taken = False, True
        return lease

    def _took(self, record: Record) -> None:
        for number in record["leases"]:
            self._take(number, record["node"])

    def _refused(self, record: Record) -> None:
        self._node(record["node"]).refused += 1
        self._ended(record | {"leases": [record["lease"]]})

    def _fenced(self, record: Record) -> None:
        self._node(record["node"]).refused += 1

    def _ended(self, record: Record) -> None:
        for number in record["leases"]:
            lease = self._leases.get(number)
            if lease is None or lease.node != record["node"] or not lease.is_open:
                self._wrong(f"ends lease {number}, which is not outstanding at {record['node']}")
            else:
                lease.is_open = False

    def _expired(self, record: Record) -> None:
        self._ended(record)
        self._node(record["node"]).expired += len(record["leases"])

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
            self._begins()
        if record["version"] != len(self._steps):
            self._wrong(f"applies a step to version {record['version']}, but {len(self._steps)} are recorded")
        is_apart = record.get("apart") is True
        step = Applied.of(record, STRETCH_STEPS_MAX if is_apart else self._plan["step_batches"])
        self._require_planned(step)
        if not is_replayed:
            for start, stop, node, number in step.shares:
                self._require_lent(record["step"], start, stop, node, number)
        else:
            # The log of steps may know more than what of the ledger was synced.
            self._aside = _keys(record["aside"])
            self._ever_aside |= self._aside
        spans = joined((start, stop) for start, stop, _, _ in step.shares)
        aside = self._aside_in(step)
        if joined([*spans, *((i, i + 1) for i in aside)]) != [(0, step.count)]:
            self._wrong(f"applies batches {spans} of a step of {step.count}, with {named(aside)} set aside")
        version = len(self._steps)
        for start, stop, at in (
            _applied_at(spans, version) if is_apart else [(*each, version) for each in spans]
        ):
            again = self._applied[step.epoch].add(step.first + start, step.first + stop, at)
            if again is not None:
                batch, before = again
                self._wrong(f"applies batch {batch} of epoch {step.epoch + 1} again, after version {before}")
        self._steps += step.singly() if is_apart else [step]
        if is_replayed and self._void:
            self._void -= 1
            self._found.steps_redone -= 1
        if step.ends_epoch:
            self._ends[step.epoch] = step.first + step.count
        if record.get("durable"):
            self._found.durable_version = max(self._found.durable_version, len(self._steps))

    def _require_planned(self, step: Applied) -> None:
        samples, size = self._plan["samples"], self._plan["batch_size"]
        if samples is None:
            return
        # All are of one size; only the very last may be smaller.
        full = min(step.count, max(0, samples // size - step.first))
        rest = [(samples % size, 1)] * (step.count > full)
        planned = [each for each in [(size, full), *rest] if all(each)]
        if step.sizes != planned or sum(count for _, count in planned) != step.count:
            self._wrong(f"counts batches of {step.sizes} samples where {planned} were planned")
        if step.ends_epoch and (step.first + step.count) * size < samples:
            self._wrong(f"ends epoch {step.epoch + 1} before its last batch")

    def _require_lent(self, step: int, start: int, stop: int, node: str, number: int) -> None:
        lease = self._leases.get(number)
        if lease is not None and not lease.is_taken:
            lease = self._take(number, node)
        if lease is None or (lease.node, lease.step, lease.start, lease.stop) != (node, step, start, stop):
            self._wrong(f"takes batches {start} to {stop} of step {step} from {node}, who was not lent them")
        elif not lease.is_taken:
            self._wrong(f"takes what {node} never gave (lease {number})")
        else:
            lease.is_taken = False

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
        """Batches of the epoch that count in no step; None if nobody knows how many it has.

        Not all, if they are more than were set aside: then something is wrong whatever the others are.
        """
        count = self._ends.get(epoch)
        if self._plan["samples"] is not None:
            count = -(-self._plan["samples"] // self._plan["batch_size"])
        if count is None:
            return None
        return set(islice(self._applied[epoch].missing(count), len(self._aside) + NAMED_MAX))

    def _aside_of(self, epoch: int) -> set[int]:
        return {batch for of, batch in self._aside if of == epoch}

    def _aside_in(self, step: Applied) -> set[int]:
        """Which places of a step are set aside, however many there or elsewhere are."""
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

    # --- the sum ----------------------------------------------------------------------------------

    def close(self) -> Findings:
        """Everything is read: what it comes to."""
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
                self._node(node).batches += stop - start
                self._node(node).samples += samples
                found.batches += stop - start
                found.samples += samples
        return found


def _keys(pairs: list[list[int]]) -> set[tuple[int, int]]:
    return {(whole(epoch), whole(batch)) for epoch, batch in pairs}


def _applied_at(spans: list[tuple[int, int]], version: int) -> list[tuple[int, int, int]]:
    """Each batch of a stretch, and the version it was applied to."""
    batches = [batch for start, stop in spans for batch in range(start, stop)]
    return [(batch, batch + 1, version + number) for number, batch in enumerate(batches)]
