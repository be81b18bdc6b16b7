"""The life cycles of leases, as an audit follows them: given once, to a node that is there, and ended once.

Knows no steps, epochs or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from w5xde.control.audit.findings import Findings
from w5xde.control.audit.records import Record

# The upper bits of a lease's number are the life of the coordinator that gave it.
_LIFE_SHIFT = 40


@dataclass(slots=True)
class _AuditedLease:
    node: str
    step: int
    start: int
    stop: int
    # It is of a validation, and no step may use its answer.
    validates: bool = False
    is_open: bool = True
    # An answer was accepted, and no step has used it.
    is_taken: bool = False


class LeaseCheck:
    """Follows every lease of one life; passes each violation to `wrong`."""

    def __init__(self, wrong: Callable[[str], None], found: Findings) -> None:
        self._wrong = wrong
        self._found = found
        self._life = 0
        self._members: set[str] = set()
        self._leases: dict[int, _AuditedLease] = {}

    def begin_life(self, life: int) -> None:
        """Leases end with the coordinator that gave them."""
        self._life = life
        self._members.clear()
        self._leases.clear()

    def joined(self, record: Record) -> None:
        self._members.add(record["node"])

    def left(self, record: Record) -> None:
        if record["node"] not in self._members:
            self._wrong(f"lets {record['node']} leave, who was not there")
        self._members.discard(record["node"])

    def lent(self, record: Record) -> None:
        node = record["node"]
        if node not in self._members:
            self._wrong(f"lends to {node}, who is not there")
        for lease, step, start, stop in record["leases"]:
            if lease >> _LIFE_SHIFT != self._life or lease in self._leases:
                self._wrong(f"gives lease {lease} twice, or in the wrong life")
            validates = record.get("validates") is True
            self._leases[lease] = _AuditedLease(node, step, start, stop, validates)
            self._found.node(node).leases += 1

    def took(self, record: Record) -> None:
        for number in record["leases"]:
            self._take(number, record["node"])

    def _take(self, number: int, node: str) -> None:
        lease = self._leases.get(number)
        if lease is None or lease.node != node or not lease.is_open:
            self._wrong(f"accepts an answer of {node} to lease {number}, which is not outstanding there")
        else:
            lease.is_open, lease.is_taken = False, True

    def refused(self, record: Record) -> None:
        self._found.node(record["node"]).refused += 1
        self.ended(record | {"leases": [record["lease"]]})

    def fenced(self, record: Record) -> None:
        self._found.node(record["node"]).refused += 1

    def ended(self, record: Record) -> None:
        for number in record["leases"]:
            lease = self._leases.get(number)
            if lease is None or lease.node != record["node"] or not lease.is_open:
                self._wrong(f"ends lease {number}, which is not outstanding at {record['node']}")
            else:
                lease.is_open = False

    def expired(self, record: Record) -> None:
        self.ended(record)
        self._found.node(record["node"]).expired += len(record["leases"])

    def use(self, step: int, start: int, stop: int, node: str, number: int) -> None:
        """A step uses the answer to a lease: it must be of these batches, accepted, and used once."""
        lease = self._leases.get(number)
        if lease is not None and not lease.is_taken:
            # The step's record stands for the acceptance too.
            self._take(number, node)
        if lease is None or (lease.node, lease.step, lease.start, lease.stop) != (node, step, start, stop):
            self._wrong(f"takes batches {start} to {stop} of step {step} from {node}, who was not lent them")
        elif lease.validates:
            self._wrong(f"takes what {node} measured for a validation (lease {number})")
        elif not lease.is_taken:
            self._wrong(f"takes what {node} never gave (lease {number})")
        else:
            lease.is_taken = False
