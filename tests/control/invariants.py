"""What must hold of the coordinator's core between two events."""

from __future__ import annotations

from w5xde.control.coordinator import CoordinatorCore
from w5xde.tree import Span


def check(core: CoordinatorCore) -> None:
    """Raises what does not. Called after every event of thousands of runs: sentences are made when needed."""
    for lease in core.view.leases:
        member = core.view.members.get(lease.node)
        if member is None or lease.id not in member.pending:
            raise AssertionError(f"{lease} is not in its node's hands")
        if lease.version > core.view.version:
            raise AssertionError(f"{lease} comes from the future")
    for step in core.view.open_steps:
        held = [lease.span for lease in core.view.leases.of_step(step.plan.index)]
        free = [0] * step.plan.count
        for span in step.free:
            for batch in range(*span):
                free[batch] += 1
        if any(count > 1 for count in free):
            raise AssertionError(f"a batch of step {step.plan.index} is free twice")
        for span in held:
            free[span.start : span.stop] = [1] * span.count
        for batch, known in enumerate(free):
            if not known and not step.tree.covers(Span(batch, batch + 1)):
                raise AssertionError(f"batch {batch} of step {step.plan.index} is lost")
        if step.free_batches != sum(span.count for span in step.free):
            raise AssertionError(f"step {step.plan.index} miscounts its free batches")
    pending = sum(sum(member.pending.values()) for member in core.view.members)
    if pending != core.view.members.pending_batches:
        raise AssertionError("pending batches are miscounted")
    rate = sum(member.rate for member in core.view.members)
    if abs(rate - core.view.members.pool_rate) > 1e-6 * max(1.0, rate):
        raise AssertionError("the pool's speed is miscounted")
