"""The optimizer's settings for steps of several batches: `--scale-for-batch`.

A user who tuned an optimizer for steps of one batch wants its settings for steps of K batches. Adam and AdamW
get lr × √K and betas ^ K, SGD gets lr × √K, and everything else stays as written. Beyond the largest K that
was measured to train as well, scaling is refused. Schedules multiply on top of the scaled rate. Knows no
batches and no gradients.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from w5xde.errors import JobError

# The largest number of batches in a step for which the scaled settings were measured not to lose: with Adam
# and 16 batches the scaled run needs 40 % more steps than with the settings as written (docs/findings.md,
# "Batches a step, in one process").
ADAM_BATCHES_MAX = 8
SGD_BATCHES_MAX = 16
# More of the optimizer's groups than this are counted, and not shown.
GROUPS_SHOWN = 3
_POWERS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class GroupScaling:
    """The settings of one of the optimizer's groups, as the job wrote them and scaled. SGD has no betas."""

    lr: float
    lr_scaled: float
    betas: tuple[float, float] | None = None
    betas_scaled: tuple[float, float] | None = None

    def text(self, batches: int) -> str:
        rate = f"learning rate {self.lr:.4g} × √{batches} = {self.lr_scaled:.4g}"
        if self.betas is None or self.betas_scaled is None:
            return rate
        (first, second), power = self.betas, str(batches).translate(_POWERS)
        scaled = f"({self.betas_scaled[0]:.4g}, {self.betas_scaled[1]:.4g})"
        return f"{rate}, betas ({first:.4g}, {second:.4g}){power} = {scaled}"


@dataclass(frozen=True, slots=True)
class BatchScaling:
    """What `--scale-for-batch` changed, for the user and the manifest."""

    optimizer: str
    batches: int
    groups: tuple[GroupScaling, ...]

    @property
    def text(self) -> str:
        """One sentence about each kind of group."""
        told = list(dict.fromkeys(group.text(self.batches) for group in self.groups))
        more = [f"and {len(told) - GROUPS_SHOWN} more groups"] if len(told) > GROUPS_SHOWN else []
        return "; ".join([*told[:GROUPS_SHOWN], *more])

    def facts(self) -> dict[str, Any]:
        """What manifest and --json say."""
        return dataclasses.asdict(self) | {"text": self.text}


def scale_for_batch(optimizer: Optimizer, batches: int) -> BatchScaling:
    """Scale the settings of an optimizer in place, or raise a JobError; build a schedule only afterwards."""
    kind = type(optimizer)
    if kind not in (SGD, Adam, AdamW):
        raise _refusal(
            f"scale-for-batch cannot scale {kind.__name__}",
            "it knows how settings change with the batch for torch's SGD, Adam and AdamW alone",
        )
    batches_max = SGD_BATCHES_MAX if kind is SGD else ADAM_BATCHES_MAX
    if batches > batches_max:
        limit = f"at most {batches_max} batches a step with {kind.__name__}"
        raise _refusal(
            f"scale-for-batch is for {limit}, not {batches}",
            "beyond that, lr × √K was not measured"
            if kind is SGD
            else "beyond that, lr × √K and betas ^ K were measured to train worse than settings as written",
            f"use --batches-per-step {batches_max}, or leave out --scale-for-batch and set the rate yourself",
        )
    scaled = tuple(_scaled(group, batches) for group in optimizer.param_groups)
    for group, found in zip(optimizer.param_groups, scaled, strict=True):
        group["lr"] = found.lr_scaled
        if found.betas_scaled is not None:
            group["betas"] = found.betas_scaled
    return BatchScaling(kind.__name__, batches, scaled)


def require_kept(optimizer: Optimizer, scaling: BatchScaling) -> None:
    """Refuse a schedule that set rates or betas of its own over the scaled ones when it was built."""
    for group, scaled in zip(optimizer.param_groups, scaling.groups, strict=True):
        # Every schedule keeps the rate that it multiplies here.
        is_kept = group.get("initial_lr", scaled.lr_scaled) == scaled.lr_scaled
        if not is_kept or group.get("betas") != scaled.betas_scaled:
            raise _refusal(
                "scale-for-batch cannot scale this schedule: it sets rates or momenta itself",
                "OneCycleLR and CyclicLR replace the optimizer's own, scaled or not",
                "scale the numbers that you give to the schedule, and leave out --scale-for-batch",
            )


def _scaled(group: dict[str, Any], batches: int) -> GroupScaling:
    lr, betas = group["lr"], group.get("betas")
    if not isinstance(lr, (int, float)) or not all(isinstance(beta, (int, float)) for beta in betas or ()):
        raise _refusal(
            "scale-for-batch cannot scale a learning rate or betas that are tensors",
            "a program that holds the tensor could change it, or mean its value as it is",
            "give them as numbers:  lr=1e-3",
        )
    if "initial_lr" in group:
        raise _refusal(
            "scale-for-batch cannot scale an optimizer that has a schedule already",
            "the schedule keeps the rate that it was built with",
            "build the schedule in the job's scheduler=",
        )
    if betas is None:
        return GroupScaling(lr, lr * math.sqrt(batches))
    first, second = betas
    return GroupScaling(lr, lr * math.sqrt(batches), (first, second), (first**batches, second**batches))


def _refusal(
    what: str, why: str, fix: str = "leave out --scale-for-batch and set the rate yourself"
) -> JobError:
    return JobError(what, code="W5-233", why=why, fix=fix)
