"""The settings of the life of a run: when it is evaluated, saved and resumed. Knows no other settings."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the model is evaluated, and what is kept of the run."""

    evaluate_every: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="steps between evaluations (default: once an epoch and at the end)"),
    ] = None
    evaluate: Annotated[
        Literal["wait", "skip"],
        Meta(
            description="an evaluation that is due while another one is under way. wait: training waits until"
            " it can begin; skip: leave it out, and say so"
        ),
    ] = "wait"
    plateau_metric: Annotated[
        str | None,
        Meta(
            description="the metric that steps ReduceLROnPlateau (default: the only one, or loss); training"
            " waits for it"
        ),
    ] = None
    checkpoint_every: Annotated[
        str, Meta(description="how often a checkpoint is written: 30s, 5m, 500steps or off")
    ] = "30s"
    keep_checkpoints: Annotated[int, Meta(ge=3, description="how many checkpoints are kept")] = 3
    durability: Annotated[
        Literal["checkpoint", "step"],
        Meta(description="step: every step is on disk before it counts, so that no step is ever redone"),
    ] = "checkpoint"
    skip_bad_batches: Annotated[
        bool, Meta(description="call an epoch complete without batches that fail on every node")
    ] = False
    resume: Annotated[str | None, Meta(description="continue this run (its name, its folder, or latest)")] = (
        None
    )
    override: Annotated[
        str | None,
        Meta(description="change the learning rate of a run that is resumed: lr=0.001, or lr=x0.1 (a tenth)"),
    ] = None
    name: Annotated[str | None, Meta(description="name of the run (default: a new one)")] = None
    runs: Annotated[str, Meta(description="folder in which runs are kept")] = "runs"
