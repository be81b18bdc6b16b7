"""Lightning's own validation, on one model: its Trainer runs, with the user's loaders and hooks.

Knows nothing of training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from w5xde.frameworks.lightning_arguments import LightningArguments
from w5xde.frameworks.refusals import overridden

# Called when the module was built; once more, they could build other layers.
_DONE = ("prepare_data", "setup", "configure_model", "teardown")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class ForwardedLogger:
    """A logger in a validation: user code reaches the real one, and Lightning's own rows are not written.

    Rows of metrics are written with the step of the weights, which this validation does not know.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log_metrics(self, *arguments: Any, **more: Any) -> None: ...

    def log_hyperparams(self, *arguments: Any, **more: Any) -> None: ...

    def log_graph(self, *arguments: Any, **more: Any) -> None: ...

    def save(self) -> None: ...

    def finalize(self, status: str) -> None: ...


def validate(
    module: Any, library: ModuleType, arguments: LightningArguments, loaders: Any, data: Any
) -> dict[str, float]:
    """The metrics of a module over these loaders; `data` is the data module, for its hooks, or None."""
    with _quiet(), _as_built(module, library, data):
        trainer = library.Trainer(
            accelerator="cpu",
            devices=1,
            precision=arguments.given.get("precision"),
            limit_val_batches=arguments.given.get("limit_val_batches"),
            logger=[ForwardedLogger(each) for each in arguments.loggers] or False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            # The model may be trained on; tensors of inference mode could not.
            inference_mode=False,
        )
        trainer.validate(module, dataloaders=loaders, verbose=False)
    # Names with _step are values of the last batch.
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if not name.endswith("_step") or name.removesuffix("_step") not in trainer.callback_metrics
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from telling which devices there are, at each evaluation."""
    # Both packages may be loaded, and tell under one name.
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _as_built(module: Any, library: ModuleType, data: Any) -> Iterator[None]:
    """Leave the module as it was built, with the data module's hooks for batches; detach it at the end."""
    own: dict[str, Any] = dict.fromkeys(_DONE, lambda *arguments, **more: None)
    if data is not None:
        hooks = overridden(data, library.LightningDataModule, _TRANSFER)
        own |= {name: getattr(data, name) for name in hooks}
    vars(module).update(own)
    try:
        yield
    finally:
        for name in own:
            del vars(module)[name]
        module.trainer = None
