"""The audit: reads the records of a ledger, in order, and counts again. Uses nothing of what wrote them.

Every batch of an epoch that was called complete must have been applied in exactly one step that still
counts; every step must be made of leases that were given to those nodes, in that life of the coordinator,
and ended just so. What does not add up is a violation; what a user should know besides is a remark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from w5xde.control.findings import Contribution, Findings

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


@dataclass(slots=True)
class _Applied:
    """A step that counts."""

    epoch: int
    first: int
    sizes: list[int]
    ends_epoch: bool
    shares: list[tuple[int, int, str, int]]

    @property
    def batches(self) -> list[int]:
        return [self.first + i for start, stop, _, _ in self.shares for i in range(start, stop)]

    def singly(self) -> list[_Applied]:
        """The same if every batch was applied as a step of its own."""
        found = [
            _Applied(self.epoch, self.first + i, [self.sizes[i]], False, [(0, 1, node, lease)])
            for start, stop, node, lease in sorted(self.shares)
            for i in range(start, stop)
        ]
        found[-1].ends_epoch = self.ends_epoch
        return found


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
        self._steps: list[_Applied] = []
        self._applied: dict[tuple[int, int], int] = {}
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
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
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
        self._plan = plan
        self._is_stopped = False
        self._found.ended = ""
        self._is_restored = self._life == 1 and self._found.lives == 1
        self._members.clear()
        self._leases.clear()

    def _restore(self, record: Record) -> None:
        version = record["version"]
        if version > len(self._steps):
            self._wrong(f"restores version {version}, but only {len(self._steps)} steps are recorded")
        known = self._found.checkpoints.get(version)
        if known is not None and record["sha256"] != known:
            self._wrong(f"restores another checkpoint of version {version} than was written")
        # Those that are replayed from a log, below, are not redone.
        self._void = max(0, len(self._steps) - version)
        self._found.steps_redone += self._void
        for step in self._steps[version:]:
            for batch in step.batches:
                self._applied.pop((step.epoch, batch), None)
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
            self._wrong(f"calls {sorted(self._aside - self._ever_aside)} set aside, which never were")

    def _is_still_complete(self, epoch: int) -> bool:
        missing = self._missing(epoch)
        return missing is not None and all((epoch, batch) in self._aside for batch in missing)

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
        self._aside.add((record["epoch"], record["batch"]))
        self._ever_aside.add((record["epoch"], record["batch"]))
        if "epoch_batches" in record:
            self._ends[record["epoch"]] = record["epoch_batches"]

    def _step(self, record: Record) -> None:
        is_replayed = record.get("replayed", False)
        if not is_replayed:
            self._begins()
        if record["version"] != len(self._steps):
            self._wrong(f"applies a step to version {record['version']}, but {len(self._steps)} are recorded")
        sizes = [size for size, count in record["sizes"] for _ in range(count)]
        shares = [(start, stop, node, lease) for start, stop, node, lease in record["shares"]]
        step = _Applied(record["epoch"], record["first"], sizes, record["ends_epoch"], shares)
        is_apart = record.get("apart", False)
        self._require_planned(step)
        if not is_replayed:
            for start, stop, node, number in shares:
                self._require_lent(record["step"], start, stop, node, number)
        else:
            # The log of steps may know more than what of the ledger was synced.
            self._aside = _keys(record["aside"])
            self._ever_aside |= self._aside
        places = sorted(batch - step.first for batch in step.batches)
        aside = [i for i in range(len(sizes)) if (step.epoch, step.first + i) in self._aside]
        if sorted(places + aside) != list(range(len(sizes))):
            self._wrong(f"applies batches {places} of a step of {len(sizes)}, with {aside} set aside")
        for batch in step.batches:
            before = self._applied.get((step.epoch, batch))
            if before is not None:
                self._wrong(f"applies batch {batch} of epoch {step.epoch + 1} again, after version {before}")
            self._applied[step.epoch, batch] = record["version"]
        self._steps += step.singly() if is_apart else [step]
        if is_replayed and self._void:
            self._void -= 1
            self._found.steps_redone -= 1
        if step.ends_epoch:
            self._ends[step.epoch] = step.first + len(sizes)
        if record.get("durable"):
            self._found.durable_version = max(self._found.durable_version, len(self._steps))

    def _require_planned(self, step: _Applied) -> None:
        samples, size = self._plan["samples"], self._plan["batch_size"]
        if samples is None:
            return
        planned = [min(size, samples - (step.first + i) * size) for i in range(len(step.sizes))]
        if step.sizes != planned:
            self._wrong(f"counts batches of {step.sizes} samples where {planned} were planned")
        if step.ends_epoch and (step.first + len(step.sizes)) * size < samples:
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
        epoch = record["epoch"] - 1
        if epoch in self._complete:
            self._wrong(f"calls epoch {epoch + 1} complete again")
        self._complete[epoch] = len(self._steps)
        missing = self._missing(epoch)
        allowed = {batch for batch in record["aside"] if (epoch, batch) in self._aside}
        if missing is None:
            self._wrong(f"calls epoch {epoch + 1} complete, but its last batch was never applied")
        elif missing != allowed:
            self._wrong(f"calls epoch {epoch + 1} complete, but batches {sorted(missing)} never counted")

    def _missing(self, epoch: int) -> set[int] | None:
        """Batches of the epoch that count in no step; None if nobody knows how many it has."""
        count = self._ends.get(epoch)
        if self._plan["samples"] is not None:
            count = -(-self._plan["samples"] // self._plan["batch_size"])
        if count is None:
            return None
        return {batch for batch in range(count) if (epoch, batch) not in self._applied}

    def _require_no_holes(self) -> None:
        done: dict[int, set[int]] = {}
        for epoch, batch in [*self._applied, *self._aside]:
            done.setdefault(epoch, set()).add(batch)
        for epoch in range(max(done, default=-1) + 1):
            batches = done.get(epoch, set())
            if batches != set(range(len(batches))):
                self._wrong(f"ends the run with a hole in epoch {epoch + 1}")
            if epoch + 1 in done and epoch not in self._complete:
                self._wrong(f"ends the run, but epoch {epoch + 1} was never complete")

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
                samples = sum(step.sizes[start:stop])
                self._node(node).batches += stop - start
                self._node(node).samples += samples
                found.batches += stop - start
                found.samples += samples
        return found


def _keys(pairs: list[list[int]]) -> set[tuple[int, int]]:
    return {(epoch, batch) for epoch, batch in pairs}
