"""Leases: who works on which batches, on which version, since when. Each is settled once.

A lease ends when its answer is taken, when it is refused or fails, when its node is gone, or when its
step is complete without it. There is no way back: an answer to a lease that ended is fenced.
Knows no sockets, tensors or clocks: callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span

# Lease numbers of one incarnation of the coordinator never meet those of another.
INCARNATION_SHIFT = 40


@dataclass(frozen=True, slots=True)
class Lease:
    """Batches `span` of a step, lent to one node, to be computed on `version`."""

    id: int
    node: str
    step: StepPlan
    span: Span
    version: int
    granted_at: float
    expected_at: float

    @property
    def where(self) -> str:
        """Which batches these are, in words."""
        first, last = self.step.first + self.span.start, self.step.first + self.span.stop - 1
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        return f"{batches} of epoch {self.step.epoch + 1}"

    @property
    def steps(self) -> int:
        """How many optimizer steps its answer takes part in."""
        return self.span.count if self.step.apart else 1

    @property
    def behind(self) -> int:
        """How many steps of its own stretch come before the last that its answer takes part in."""
        return self.span.stop - 1 if self.step.apart else 0

    @property
    def samples(self) -> int:
        return sum(self.step.sizes[self.span.start : self.span.stop])


class Leases:
    """All outstanding leases."""

    def __init__(self, incarnation: int) -> None:
        self._next = (incarnation << INCARNATION_SHIFT) + 1
        self._leases: dict[int, Lease] = {}
        self._of_step: dict[int, dict[int, Lease]] = {}
        # How many optimizer steps all of them take part in.
        self.steps = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def holds(self, lease: int) -> bool:
        return lease in self._leases

    def get(self, lease: int) -> Lease | None:
        return self._leases.get(lease)

    def new_id(self) -> int:
        self._next += 1
        return self._next - 1

    def grant(self, lease: Lease) -> None:
        if lease.id in self._leases:
            raise ValueError(f"lease {lease.id} exists")
        self._leases[lease.id] = lease
        self.steps += lease.steps
        self._of_step.setdefault(lease.step.index, {})[lease.id] = lease

    def settle(self, lease: int, node: str) -> Lease | str:
        """End an outstanding lease of this node; anything else gets the reason why not."""
        held = self._leases.get(lease)
        if held is None:
            return f"lease {lease} is not outstanding"
        if held.node != node:
            return f"lease {lease} was lent to {held.node}"
        self.end(held)
        return held

    def end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        self.steps -= lease.steps
        of_step = self._of_step[lease.step.index]
        del of_step[lease.id]
        if not of_step:
            del self._of_step[lease.step.index]

    def rewind(self, version: int) -> None:
        """Steps after this version were undone: what was lent on them was lent on this one."""
        for lease in [lease for lease in self if lease.version > version]:
            earlier = replace(lease, version=version)
            self._leases[lease.id] = self._of_step[lease.step.index][lease.id] = earlier

    def of_step(self, step: int) -> list[Lease]:
        return list(self._of_step.get(step, {}).values())

    def of_node(self, node: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.node == node]
