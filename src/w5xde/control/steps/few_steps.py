"""Warns of a run that makes very few optimizer steps for its epochs, because its steps are large.

A loop that was brought over from elsewhere made a step of every batch. Knows no data: callers pass counts.
"""

from __future__ import annotations

# With fewer steps than this hardly anything is learned, whatever the learning rate.
FEW_STEPS = 100
# And few models learn much from epochs that have fewer steps than this, unless there are very many epochs.
FEW_STEPS_IN_EPOCH, MANY_STEPS = 5, 1000


def few_steps_text(
    samples: int, batch_size: int, step_batches: int, epochs: int, *, is_default: bool = True
) -> str:
    """What to change if smaller steps would make many more of them; empty if there are enough.

    `is_default`: nobody has said how many batches a step has.
    """
    batches = -(-samples // batch_size)
    in_epoch = -(-batches // step_batches)
    steps, plain = epochs * in_epoch, epochs * batches
    if steps >= (FEW_STEPS if in_epoch >= FEW_STEPS_IN_EPOCH else MANY_STEPS):
        return ""
    counted = f"{_count(epochs, 'epoch')} of {samples:,} samples are only {_count(steps, 'step')}"
    if plain > steps:
        step = f"{batch_size} × {step_batches} = {batch_size * step_batches:,} samples a step"
        if not is_default:
            return f"{counted} ({step}): fewer --batches-per-step make more"
        return (
            f"{counted} ({step}). A plain loop with batches of {batch_size} makes {plain:,}: so does"
            " --batches-per-step 1, and a smaller --batch-size makes more"
        )
    if in_epoch == 1 and samples > 1:
        return f"{counted}, because one batch has them all: a smaller --batch-size makes more"
    return ""


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
