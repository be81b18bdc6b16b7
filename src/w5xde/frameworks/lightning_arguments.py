"""What the arguments of a Lightning Trainer mean for a run, and which of them are refused.

Knows no models and no data: it reads the dict that the user wrote, and gets the batches of an epoch passed.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from w5xde.errors import JobError
from w5xde.frameworks.refusals import refuse_argument

# As Lightning does, if neither epochs nor steps are given.
EPOCHS = 1000
LOG_EVERY_STEPS = 50
# Where Lightning's `seed_everything` leaves the seed.
SEED_VARIABLE = "PL_GLOBAL_SEED"
# Arguments that change nothing that is trained: of progress bars, of checkpoints, or of one machine alone.
IGNORED = {
    "barebones", "benchmark", "default_root_dir", "deterministic", "detect_anomaly", "enable_autolog_hparams",
    "enable_checkpointing", "enable_model_summary", "enable_progress_bar", "inference_mode",
    "limit_predict_batches", "limit_test_batches", "model_registry", "num_sanity_val_steps", "profiler",
    "use_distributed_sampler",
}  # fmt: skip
_PRECISIONS = {
    None: "fp32", 32: "fp32", "32": "fp32", "32-true": "fp32", "bf16": "bf16", "bf16-mixed": "bf16",
}  # fmt: skip
_DEVICES = {"auto": None, "cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps"}
# Strategies that compute the mean of the gradients of whole models, as a pool does.
_STRATEGIES = ("auto", "single_device", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
# Arguments that must have one of these values, why, and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "fast_dev_run": ((False, 0), "it is a mode of Lightning's loop", "try a few steps: --steps 2"),
    "min_epochs": ((None, 0, 1), "a run has no lower limit", "leave it out"),
    "min_steps": ((None, 0, -1), "a run has no lower limit", "leave it out"),
    "limit_train_batches": ((None, 1.0), "every sample counts once", "use torch.utils.data.Subset"),
    "overfit_batches": ((0, 0.0), "every sample counts once", "use torch.utils.data.Subset"),
    "gradient_clip_algorithm": ((None, "norm"), "only norms are clipped", "use 'norm'"),
    "plugins": ((None,), "they belong to Lightning's loop", "leave them out"),
    "sync_batchnorm": ((False,), "each batch has statistics of its own", "use GroupNorm or LayerNorm"),
    "reload_dataloaders_every_n_epochs": ((0,), "the data are the same in every epoch", "leave it out"),
}


@dataclass(slots=True)
class LightningArguments:
    """The arguments of a Lightning Trainer, as far as a run knows them."""

    given: Mapping[str, Any]
    # Batches of one device in a step, and the batches of all devices.
    accumulation: int = field(init=False)
    step_batches: int = field(init=False)

    def __post_init__(self) -> None:
        self.accumulation = int(self.given.get("accumulate_grad_batches") or 1)
        self.step_batches = self.accumulation * self._devices() * int(self.given.get("num_nodes") or 1)

    def check(self, trainer: type) -> None:
        """Refuse unknown arguments, and those that would be ignored though they change what is trained."""
        known = list(inspect.signature(trainer).parameters)
        for name in self.given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise JobError(
                    f"Lightning's Trainer has no argument {name!r}",
                    code="W5-292",
                    fix=f"did you mean {near[0]!r}?" if near else "see lightning.pytorch.Trainer",
                )
        for name, (allowed, why, fix) in _REFUSED.items():
            value = self.given.get(name, allowed[0])
            if value not in allowed:
                raise self._refuse(name, why, fix)
        if self.given.get("strategy", "auto") not in _STRATEGIES:
            raise self._refuse("strategy", "every node holds the whole model", "use 'auto' or leave it out")
        if self.given.get("precision") not in _PRECISIONS:
            why = "nodes compute in float32, or under bfloat16 autocast"
            raise self._refuse("precision", why, "use '32-true' or 'bf16-mixed', or convert the module")
        if self.given.get("accelerator", "auto") not in _DEVICES:
            raise self._refuse("accelerator", "nodes use the devices of torch", "use 'auto', 'cpu' or 'gpu'")

    def _refuse(self, name: str, why: str, fix: str) -> JobError:
        return refuse_argument("Trainer", name, self.given.get(name), why, fix)

    def _devices(self) -> int:
        """How many devices of a machine; 1 where Lightning would look at the machine."""
        devices = self.given.get("devices", "auto")
        if isinstance(devices, str) and "," in devices:
            devices = [each for each in devices.split(",") if each.strip()]
        if isinstance(devices, list | tuple):
            return max(1, len(devices))
        if devices in ("auto", -1, "-1", None):
            return 1
        return int(devices)

    # --- what a run needs -------------------------------------------------------------------------

    @property
    def max_epochs(self) -> int | None:
        """The limit of epochs; None: there is none."""
        epochs = self.given.get("max_epochs")
        if epochs is None:
            has_limit = self.max_steps is not None or self.given.get("max_time") is not None
            return None if has_limit else EPOCHS
        return None if epochs == -1 else int(epochs)

    @property
    def max_steps(self) -> int | None:
        steps = self.given.get("max_steps", -1)
        return None if steps in (None, -1) else int(steps)

    @property
    def log_every_steps(self) -> int:
        every = self.given.get("log_every_n_steps")
        return LOG_EVERY_STEPS if every is None else int(every)

    @property
    def loggers(self) -> list[Any]:
        """Loggers that were given. Lightning's default logger is not used: a run keeps its own metrics."""
        return [each for each in _as_list(self.given.get("logger")) if not isinstance(each, bool)]

    @property
    def callbacks(self) -> list[Any]:
        return _as_list(self.given.get("callbacks"))

    @property
    def validates(self) -> bool:
        limit = self.given.get("limit_val_batches")
        return limit is None or limit > 0

    @property
    def wants_epoch_batches(self) -> bool:
        """Whether `settings` needs the number of batches in an epoch."""
        return (self.given.get("check_val_every_n_epoch") or 1) > 1 or self._is_part_of_epoch

    @property
    def _is_part_of_epoch(self) -> bool:
        interval = self.given.get("val_check_interval")
        return isinstance(interval, float) and interval < 1.0

    def settings(self, epoch_batches: int | None) -> dict[str, Any]:
        """The settings of a run that trains as a Trainer with these arguments would."""
        found: dict[str, Any] = {
            "batches_per_step": self.step_batches,
            "precision": _PRECISIONS[self.given.get("precision")],
        }
        if clip := self.given.get("gradient_clip_val"):
            found["clip_norm"] = float(clip)
        if self.max_epochs is not None:
            found["epochs"] = self.max_epochs
        if self.max_steps is not None:
            found["steps"] = self.max_steps
        if (limit := self.given.get("max_time")) is not None:
            found["seconds"] = _seconds(limit)
        if device := _DEVICES[self.given.get("accelerator", "auto")]:
            found["devices"] = device
        if (seed := os.environ.get(SEED_VARIABLE, "")).isdecimal():
            found["seed"] = int(seed)
        return found | self._evaluation(epoch_batches)

    def _evaluation(self, epoch_batches: int | None) -> dict[str, int]:
        """The interval of evaluations, if it is not once an epoch."""
        interval, epochs = self.given.get("val_check_interval"), self.given.get("check_val_every_n_epoch", 1)
        if isinstance(interval, str | dict | timedelta):
            why = "evaluations go by steps, so that they are the same whatever the machines' speed"
            raise self._refuse("val_check_interval", why, "give a number of batches, or a part of an epoch")
        batches: float | None = None
        if isinstance(interval, int):
            batches = interval * self.step_batches / self.accumulation
        elif epoch_batches is not None and isinstance(interval, float) and interval < 1.0:
            batches = interval * epoch_batches
        elif epoch_batches is not None and (epochs or 1) > 1:
            return {"evaluate_every": epochs * -(-epoch_batches // self.step_batches)}
        return {} if batches is None else {"evaluate_every": max(1, round(batches / self.step_batches))}


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) else [value]


def _seconds(limit: Any) -> float:
    """Seconds of a timedelta, of a dict of its arguments, or of DD:HH:MM:SS."""
    if isinstance(limit, str):
        days, hours, minutes, seconds = (int(part) for part in limit.split(":"))
        limit = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    return (timedelta(**limit) if isinstance(limit, Mapping) else limit).total_seconds()
