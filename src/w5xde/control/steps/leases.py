"""Leases: which node computes which batches, on which version, since when. Each is settled once.

A lease ends when its answer is accepted or rejected, when it fails, when its node leaves, or when its step is
complete without it. A lease that has ended stays so: an answer to it is fenced.
Knows no sockets, tensors or clocks: callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from w5xde.control.steps.plan import StepPlan
from w5xde.tree import Span

# A lease id is the coordinator's incarnation, shifted by this many bits, plus a counter: ids of two
# incarnations never collide.
INCARNATION_SHIFT = 40


@dataclass(frozen=True, slots=True)
class Lease:
    """A span of a step's batches, lent to one node, which computes them on the parameters of `version`.

    `updates`: how many updates of the model were decided before it was granted. `ahead`: by how many updates
    its parameters look ahead of the version, because its answer will be about so late (both in async mode).
    """

    id: int
    node: str
    step: StepPlan
    span: Span
    version: int
    granted_at: float
    expected_at: float
    updates: int = 0
    ahead: float = 0.0

    @property
    def where(self) -> str:
        """A phrase for messages that names the batches and their epoch."""
        step, epoch = self.step, self.step.epoch + 1
        if step.validates:
            batches = f"{self.span.start} to {self.span.stop - 1}" if self.span.count > 1 else self.span.start
            return f"batch {batches} of the validation of step {self.version}"
        if step.columns:
            last = step.index + step.steps
            return f"column {self.span.start + 1} of steps {step.index + 1} to {last} of epoch {epoch}"
        first, last = step.first + self.span.start, step.first + self.span.stop - 1
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        return f"{batches} of epoch {epoch}"

    @property
    def samples(self) -> int:
        return self.step.samples_of(self.span)

    @property
    def batches(self) -> int:
        return self.span.count * self.step.leaf_batches


class Leases:
    """All outstanding leases, oldest first."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._next = (incarnation << INCARNATION_SHIFT) + 1
        self._leases: dict[int, Lease] = {}
        self._of_step: dict[int, dict[int, Lease]] = {}

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
        self._of_step.setdefault(lease.step.index, {})[lease.id] = lease

    def settle(self, lease: int, node: str) -> Lease | str:
        """End a lease of this node and return it; if there is none, return the reason."""
        held = self._leases.get(lease)
        if held is None:
            return f"lease {lease} is not outstanding"
        if held.node != node:
            return f"lease {lease} was lent to {held.node}"
        self.end(held)
        return held

    def end(self, lease: Lease) -> None:
        del self._leases[lease.id]
        of_step = self._of_step[lease.step.index]
        del of_step[lease.id]
        if not of_step:
            del self._of_step[lease.step.index]

    def rewind(self, version: int) -> None:
        """Note that later versions were rolled back: leases on them count as leases on this version."""
        for lease in [lease for lease in self if lease.version > version]:
            earlier = replace(lease, version=version)
            self._leases[lease.id] = self._of_step[lease.step.index][lease.id] = earlier

    def of_step(self, step: int) -> list[Lease]:
        return list(self._of_step.get(step, {}).values())

    def of_node(self, node: str) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.node == node]
