"""What `self.trainer` and `self.log` are while a LightningModule is used without Lightning's loop.

`TrainerStandIn` answers what can be known in every process, and refuses the rest by name. Knows nothing of
nodes; the place in the run comes from `current`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from w5xde.frameworks.lightning_arguments import LightningArguments
from w5xde.learn.train.position import current
from w5xde.specs.planned_run import PlannedRun


@dataclass(frozen=True, slots=True)
class Logged:
    """How a value is logged in a training step."""

    on_step: bool = True
    on_epoch: bool = False

    def names(self, name: str) -> tuple[str, str]:
        """The names of the value of a step and of the mean of an epoch; empty: not logged so."""
        if self.on_step and self.on_epoch:
            return f"{name}_step", f"{name}_epoch"
        return (name, "") if self.on_step else ("", name)


class LogBook:
    """The names that `training_step` logs, found in the first step of this process.

    Values stay where they are computed: the mean loss of a step, which the run knows, is logged in place of
    those that are the loss.
    """

    def __init__(self) -> None:
        self.losses: dict[str, Logged] = {}
        self.dropped: list[str] = []
        self._is_open = True
        self._values: dict[str, tuple[Any, Logged]] = {}

    def log(self, name: str, value: Any, how: Mapping[str, Any]) -> None:
        """Note a value; `how` are the other arguments of Lightning's `log`."""
        if self._is_open:
            on_step = how.get("on_step")
            logged = Logged(on_step is None or bool(on_step), bool(how.get("on_epoch")))
            self._values[name] = value, logged

    def close(self, loss: Tensor) -> None:
        """The first step is over, with this loss."""
        if self._is_open:
            self._is_open = False
            for name, (value, logged) in self._values.items():
                # Not by value: to look at it would keep the step from being recorded.
                if isinstance(value, Tensor) and value.data_ptr() == loss.data_ptr():
                    self.losses[name] = logged
                else:
                    self.dropped.append(name)
            self._values.clear()


class TrainerStandIn:
    """In place of Lightning's Trainer: `self.trainer` in `configure_optimizers` and `training_step`."""

    # One process among many, of which none is the first: user code must not print or save here.
    is_global_zero = False
    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0
    training = True
    validating = testing = predicting = sanity_checking = evaluating = fast_dev_run = barebones = False
    progress_bar_callback = None
    should_stop = False

    def __init__(
        self, arguments: LightningArguments, data: Callable[[], Any], silent_logger: Callable[[], Any]
    ) -> None:
        """`data` gives the data module; `silent_logger` a logger that forgets what it is given."""
        vars(self).update(
            _arguments=arguments, _data=data, _silent_logger=silent_logger, _planned=None, book=LogBook()
        )
        vars(self)["_in_step"] = False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"self.trainer.{name} is not known where nodes compute: Lightning's loop does not run"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"self.trainer.{name} cannot be set where nodes compute")

    # --- what is known of the run -----------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        return current().epoch if self._in_step else 0

    @property
    def global_step(self) -> int:
        return current().step if self._in_step else 0

    @property
    def max_epochs(self) -> int:
        planned, given = self._planned, self._arguments.max_epochs
        epochs = planned.epochs if planned is not None else given
        return -1 if epochs is None else int(epochs)

    @property
    def max_steps(self) -> int:
        return -1 if self._arguments.max_steps is None else int(self._arguments.max_steps)

    @property
    def accumulate_grad_batches(self) -> int:
        return int(self._arguments.accumulation)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """How many optimizer steps the run has."""
        steps = current().steps if self._in_step else self._planned and self._planned.steps
        return float("inf") if steps is None else int(steps)

    @property
    def num_training_batches(self) -> int | float:
        """How many batches an epoch has; of each device, if there are several."""
        if self._planned is None or self._planned.epoch_batches is None:
            return float("inf")
        devices = self._arguments.step_batches // self._arguments.accumulation
        return -(-int(self._planned.epoch_batches) // int(devices))

    @property
    def datamodule(self) -> Any:
        return self._data()

    @property
    def logger(self) -> Any:
        return self._silent_logger()

    @property
    def loggers(self) -> list[Any]:
        return [self._silent_logger()]

    # --- modules ----------------------------------------------------------------------------------

    @contextmanager
    def attached(
        self, module: Any, planned: PlannedRun | None = None, *, in_step: bool = False
    ) -> Iterator[None]:
        """Let a module have this trainer and its log, and leave the module as it was.

        `planned` is known where an optimizer is made; the place in the run inside a training step.
        """
        book: LogBook = self.book
        vars(self).update(_planned=planned, _in_step=in_step)
        module.trainer = self
        vars(module)["log"] = _log_into(book)
        vars(module)["log_dict"] = _log_all_into(book)
        try:
            yield
        finally:
            del vars(module)["log"], vars(module)["log_dict"]
            module.trainer = None
            vars(self).update(_planned=None, _in_step=False)


def _log_into(book: LogBook) -> Callable[..., None]:
    def log(name: str, value: Any, *others: Any, **how: Any) -> None:
        book.log(name, value, how)

    return log


def _log_all_into(book: LogBook) -> Callable[..., None]:
    def log_dict(dictionary: Mapping[str, Any], *others: Any, **how: Any) -> None:
        for name, value in dictionary.items():
            book.log(name, value, how)

    return log_dict


def reset_metrics(module: nn.Module, metric: Any) -> None:
    """Let metrics of a module forget a batch: each node has seen other batches than the others."""
    for each in module.modules() if metric is not None else ():
        if isinstance(each, metric):
            each.reset()
