"""What the training loop of a framework can do and a pool cannot: refused by name, with the way out.

The tables list it all. Imports no framework: callers say what they found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from w5xde.errors import JobError

# The way out for code that needs a loop of its own.
POOL = "keep your loop and let nodes compute its gradients: w5xde.Pool (docs/porting.md)"

_BETWEEN = "it comes between the gradients and the optimizer, which steps once for the batches of all nodes"
_LOOP = "it is called by Lightning's loop, which does not run here"
_CHECKPOINT = "checkpoints are w5xde's own, and hold weights, optimizer, schedule and plan"

# Hooks of a LightningModule that would be ignored, with the reason why they cannot be called.
LIGHTNING_HOOKS = {
    "backward": _BETWEEN,
    "on_before_backward": _BETWEEN,
    "on_after_backward": _BETWEEN,
    "on_before_zero_grad": _BETWEEN,
    "on_before_optimizer_step": _BETWEEN,
    "optimizer_step": _BETWEEN,
    "optimizer_zero_grad": _BETWEEN,
    "configure_gradient_clipping": _BETWEEN,
    "lr_scheduler_step": _BETWEEN,
    "on_fit_start": _LOOP,
    "on_fit_end": _LOOP,
    "on_train_start": _LOOP,
    "on_train_end": _LOOP,
    "on_train_epoch_start": _LOOP,
    "on_train_epoch_end": _LOOP,
    "on_train_batch_start": _LOOP,
    "on_train_batch_end": _LOOP,
    "on_save_checkpoint": _CHECKPOINT,
    "on_load_checkpoint": _CHECKPOINT,
    "configure_sharded_model": "every node holds the whole model",
}
# Methods of a Hugging Face Trainer that would be ignored if a subclass overrides them.
TRAINER_METHODS = {
    "train": "the Trainer's loop does not run here",
    "training_step": f"it calls backward itself, and nodes do that; {_BETWEEN}",
}
# Callbacks of Lightning that change the training itself.
LIGHTNING_CALLBACKS = {
    "BackboneFinetuning": "it changes which parameters are trained in the middle of a run",
    "BaseFinetuning": "it changes which parameters are trained in the middle of a run",
    "BatchSizeFinder": "the batch size is fixed for a run",
    "GradientAccumulationScheduler": "the number of batches in a step is fixed for a run",
    "LambdaCallback": _LOOP,
    "LearningRateFinder": "it trains and rolls back by itself",
    "ModelPruning": "it changes the parameters of the model",
    "StochasticWeightAveraging": "it replaces the optimizer's schedule and the weights",
    "WeightAveraging": "it replaces the weights",
    "EMAWeightAveraging": "it replaces the weights",
}


def refuse_argument(owner: str, argument: str, value: Any, why: str, fix: str = POOL) -> JobError:
    """The error for an argument of a framework's trainer that has no counterpart."""
    return JobError(f"{owner}({argument}={value!r}) cannot be used here", code="W5-292", why=why, fix=fix)


def refuse_hooks(owner: object, reasons: dict[str, str], found: Iterable[str], more: str = "") -> JobError:
    """The error for hooks or methods that an object overrides and that would not be called."""
    names = list(found)
    listed = ", ".join(names)
    return JobError(
        f"{type(owner).__name__} overrides {listed}, which would not be called",
        code="W5-293",
        why=reasons[names[0]],
        fix=f"{more}{POOL}",
    )


def overridden(instance: object, base: type, names: Iterable[str]) -> list[str]:
    """The methods of `base` among these names that the object's own class, or the object, replaces."""
    kind = type(instance)
    return [
        name
        for name in names
        if name in vars(instance) or getattr(kind, name, None) is not getattr(base, name, None)
    ]


def missing_library(error: ImportError, extra: str) -> JobError:
    """The error for a framework that is not installed."""
    return JobError(
        f"a package that the job needs is missing: {error}",
        code="W5-290",
        fix=f"pip install 'w5xde[{extra}]'",
    )
