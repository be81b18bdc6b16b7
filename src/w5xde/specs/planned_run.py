"""How long a run will be, for its plan, and for optimizers and schedules that must know it."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The planned length of a run; None where that is not known, as with a stream."""

    # Optimizer steps of the whole run, and of an epoch.
    steps: int | None = None
    epoch_steps: int | None = None
    # Batches of an epoch, and of a step.
    epoch_batches: int | None = None
    step_batches: int = 1
    epochs: int | None = None

    @classmethod
    def of(
        cls,
        *,
        samples: int | None,
        batch_size: int,
        step_batches: int,
        epoch_limit: int | None,
        step_limit: int | None,
    ) -> PlannedRun:
        """The length of a run whose epochs have this many samples."""
        steps = planned_steps(
            samples=samples,
            batch_size=batch_size,
            step_batches=step_batches,
            epoch_limit=epoch_limit,
            step_limit=step_limit,
        )
        if samples is None:
            return cls(steps, step_batches=step_batches, epochs=epoch_limit)
        batches = -(-samples // batch_size)
        epoch_steps = -(-batches // step_batches)
        epochs = epoch_limit if steps is None else -(-steps // epoch_steps)
        return cls(steps, epoch_steps, batches, step_batches, epochs)


# Where nothing is known, as in a trial.
UNKNOWN = PlannedRun()
