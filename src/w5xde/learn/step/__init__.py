"""The optimizer step: sums of updates, their checks, the step, and its state in a checkpoint."""
