"""How many optimizer steps a run has, by its limits and its data. Knows no plan and no nodes."""

from __future__ import annotations


def planned_steps(
    *,
    samples: int | None,
    batch_size: int,
    step_batches: int,
    epoch_limit: int | None,
    step_limit: int | None,
) -> int | None:
    """The number of steps of the whole run; None if nothing limits it, or the data set is a stream."""
    limits = [] if step_limit is None else [step_limit]
    if epoch_limit is not None and samples is not None:
        batches = -(-samples // batch_size)
        limits.append(epoch_limit * -(-batches // step_batches))
    return min(limits, default=None)
