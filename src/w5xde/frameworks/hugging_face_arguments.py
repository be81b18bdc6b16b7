"""What the arguments of a Hugging Face Trainer mean for a run, and which of them are refused.

Knows no models and no data: it reads `TrainingArguments`, and gets the batches of an epoch passed.
"""

from __future__ import annotations

import math
from typing import Any

from w5xde.errors import JobError
from w5xde.frameworks.refusals import refuse_argument

_ARGUMENTS = "TrainingArguments"
_WHOLE = "every node holds the whole model, and w5xde shares the batches among nodes itself"
# Arguments that must have this value, why, and what to do instead.
_REFUSED: dict[str, tuple[Any, str, str]] = {
    "fp16": (False, "it scales losses by what earlier steps found", "use bf16=True, or neither"),
    "deepspeed": (None, _WHOLE, "leave it out"),
    "parallelism_config": (None, _WHOLE, "leave it out"),
    "auto_find_batch_size": (False, "the batch size is fixed for a run", "set per_device_train_batch_size"),
    "neftune_noise_alpha": (None, "its hooks belong to the Trainer's loop", "add the noise in the model"),
    "use_liger_kernel": (False, "it patches the model of one process", "apply it where the model is built"),
    "push_to_hub": (False, "every node would do it", "call push_to_hub() when training is over"),
}
_LENGTHS = "'random', 'sequential' and 'group_by_length' can be used"


def refuse_arguments(arguments: Any) -> None:
    """Refuse arguments that would be ignored, though they change what is trained."""
    for name, (expected, why, fix) in _REFUSED.items():
        value = getattr(arguments, name, expected)
        if value not in (expected, None, False):
            raise refuse_argument(_ARGUMENTS, name, value, why, fix)
    if arguments.device.type != "cpu":
        why = (
            f"the Trainer would use {arguments.device} in every process; nodes choose devices of their own"
            " (--device), and are forked before any driver starts"
        )
        raise refuse_argument(_ARGUMENTS, "use_cpu", False, why, "use_cpu=True")
    if getattr(arguments, "fsdp", None):
        raise refuse_argument(_ARGUMENTS, "fsdp", arguments.fsdp, _WHOLE, "leave it out")
    strategy = getattr(arguments, "train_sampling_strategy", "random")
    if strategy == "batch_rebalance":
        why = "its batches have different numbers of samples, by the number of processes"
        raise refuse_argument(_ARGUMENTS, "train_sampling_strategy", strategy, why, _LENGTHS)


def settings_of(arguments: Any, epoch_batches: int | None) -> dict[str, Any]:
    """The settings of a run that trains as a Trainer with these arguments would."""
    step_batches = arguments.gradient_accumulation_steps * arguments.world_size
    found: dict[str, Any] = {
        "batch_size": arguments.per_device_train_batch_size,
        "batches_per_step": step_batches,
        "seed": arguments.seed,
        "precision": "bf16" if arguments.bf16 else "fp32",
        "drop_last": arguments.dataloader_drop_last,
        "loader_workers": arguments.dataloader_num_workers,
    }
    if arguments.max_grad_norm:
        found["clip_norm"] = float(arguments.max_grad_norm)
    epoch_steps = None if epoch_batches is None else max(1, -(-epoch_batches // step_batches))
    found |= _length(arguments, epoch_steps)
    steps = found.get("steps") or (epoch_steps and epoch_steps * found["epochs"])
    if str(getattr(arguments.eval_strategy, "value", arguments.eval_strategy)) == "steps":
        every = arguments.eval_steps or arguments.logging_steps
        if every < 1 and steps is not None:
            every = math.ceil(every * steps)
        found["evaluate_every"] = max(1, int(every))
    return found


def _length(arguments: Any, epoch_steps: int | None) -> dict[str, int]:
    """The limits of the run: steps, or epochs, of which a part may be meant."""
    if arguments.max_steps > 0:
        return {"steps": int(arguments.max_steps)}
    epochs = float(arguments.num_train_epochs)
    if epochs.is_integer():
        return {"epochs": int(epochs)}
    if epoch_steps is None:
        raise JobError(
            f"{_ARGUMENTS}(num_train_epochs={epochs:g}): the length of the data set is not known",
            code="W5-292",
            fix="set max_steps",
        )
    return {"epochs": math.ceil(epochs), "steps": math.ceil(epochs * epoch_steps)}
