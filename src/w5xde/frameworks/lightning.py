"""Lightning: a LightningModule, its data and the arguments of its Trainer as a job.

The Trainer's loop does not run: nodes call `training_step`, the coordinator steps what
`configure_optimizers` returns, and validation is Lightning's own. Both packages, `lightning` and
`pytorch_lightning`, can be used. Knows nothing of nodes.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from w5xde.callbacks import Callback
from w5xde.errors import JobError
from w5xde.frameworks.lightning_arguments import LightningArguments
from w5xde.frameworks.lightning_callbacks import make_callbacks, sorted_callbacks
from w5xde.frameworks.lightning_data import LightningData
from w5xde.frameworks.lightning_optimizers import read_optimizers
from w5xde.frameworks.lightning_trainer import TrainerStandIn, reset_metrics
from w5xde.frameworks.lightning_validation import validate
from w5xde.frameworks.models import HandedOut, on_behalf_of, require_function
from w5xde.frameworks.refusals import LIGHTNING_HOOKS, POOL, missing_library, overridden, refuse_hooks
from w5xde.frameworks.schedules import Pace, PacedSchedules
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import threads
from w5xde.learn.train.position import current
from w5xde.specs.planned_run import PlannedRun

if TYPE_CHECKING:
    from w5xde.learn.job.build import ModelParameters

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def from_lightning(
    module: Callable[[], Any],
    data: Callable[[], Any] | None = None,
    *,
    trainer: Mapping[str, Any] | None = None,
    skip_hooks: Iterable[str] = (),
) -> Job:
    """The job of a LightningModule: `from_lightning(lambda: Lit(), lambda: Data(), trainer={…})`.

    `data` returns a LightningDataModule, a DataLoader, or one for training and one for validation; without it
    the module's own loaders are used. `trainer` has the arguments of Lightning's Trainer, which become the
    defaults of the run's settings. `skip_hooks` names hooks of the module that need not be called.
    """
    for given in (module, data) if data is not None else (module,):
        require_function("from_lightning", given, "from_lightning(lambda: Lit(…), lambda: Data(…))")
    recipe = LightningRecipe(module, data, trainer or {}, frozenset(skip_hooks))
    return Job(
        model=on_behalf_of(module, recipe.model),
        data=recipe.train_data,
        loss=recipe.loss,
        optimizer=recipe.optimizer,
        scheduler=recipe.scheduler,
        evaluate=recipe.evaluate if recipe.validates else None,
        settings=recipe.settings,
        callbacks=recipe.callbacks,
    )


class LightningRecipe:
    """The parts of a job, from functions that build a LightningModule and its data."""

    def __init__(
        self,
        build: Callable[[], Any],
        data: Callable[[], Any] | None,
        trainer: Mapping[str, Any],
        skipped: frozenset[str],
    ) -> None:
        self._build = build
        self._skipped = skipped
        # Only looked at: what is trained is built under the seed of the run.
        self._first = self._new_module()
        self._library = _library_of(self._first)
        self._arguments = LightningArguments(trainer)
        self._arguments.check(self._library.Trainer)
        self._refuse_hooks(self._first)
        sorted_callbacks(self._arguments.callbacks, self._library)
        self._stand_in = TrainerStandIn(self._arguments, lambda: self._data.module, self._silent_logger)
        self._data = LightningData(data, self._library.LightningDataModule, lambda: self._stand_in)
        self._handed_out = HandedOut()
        self._paced: WeakKeyDictionary[Optimizer, tuple[list[Pace], PlannedRun]] = WeakKeyDictionary()
        self._takes_index, self._reads_index = _index_use(self._first)

    def _new_module(self) -> Any:
        try:
            # Other processes are forked from this one, and must not inherit threads that are computing.
            with threads(1):
                module = self._build()
        except ImportError as error:
            raise missing_library(error, "lightning") from error
        if not any(_is_lightning_module(kind) for kind in type(module).__mro__):
            raise JobError(
                f"from_lightning was given a function that returns a {type(module).__name__}",
                code="W5-291",
                fix="return a LightningModule:  from_lightning(lambda: Lit(…), lambda: Data(…), trainer={…})",
            )
        return module

    def _refuse_hooks(self, module: Any) -> None:
        base = self._library.LightningModule
        if not module.automatic_optimization:
            raise JobError(
                f"{type(module).__name__} has automatic_optimization = False",
                code="W5-293",
                why="its training_step makes optimizer steps of its own",
                fix=POOL,
            )
        found = [hook for hook in overridden(module, base, LIGHTNING_HOOKS) if hook not in self._skipped]
        if found:
            more = f"if they may be left out: from_lightning(…, skip_hooks={found}); or "
            raise refuse_hooks(module, LIGHTNING_HOOKS, found, more)
        if not overridden(module, base, ["configure_optimizers"]):
            raise JobError(
                f"{type(module).__name__} has no configure_optimizers",
                code="W5-294",
                fix="let configure_optimizers(self) return an optimizer",
            )

    def _silent_logger(self) -> Any:
        return sys.modules[f"{self._library.__name__}.loggers.logger"].DummyLogger()

    # --- model and data ---------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """A new instance of the module, set up as Lightning sets it up for fitting."""
        module = self._handed_out.take(self._new_module())
        with self._stand_in.attached(module):
            module.setup("fit")
            module.configure_model()
        return module  # type: ignore[no-any-return]

    def train_data(self) -> Any:
        """The loader of training batches."""
        return self._data.train_loader(self._first)

    # --- loss -------------------------------------------------------------------------------------

    def loss(self, module: Any, batch: Any) -> Tensor:
        """The loss that `training_step` returns for a batch."""
        with self._stand_in.attached(module, in_step=True):
            batch = self._transferred(module, batch)
            index = [current().batch if self._reads_index else 0] if self._takes_index else []
            found = module.training_step(batch, *index)
            reset_metrics(module, _metric_class())
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, Tensor):
            raise JobError(
                f"training_step returned {type(found).__name__}, not a loss",
                code="W5-296",
                why="a batch cannot be skipped: every sample counts once",
                fix='return a tensor, or a dict with "loss"; mask samples out of the loss instead',
            )
        self._stand_in.book.close(loss)
        return loss

    def _transferred(self, module: Any, batch: Any) -> Any:
        """The batch after the hooks that Lightning calls on its way to the device, where it is already."""
        data = self._data.module
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            owner = module
            if data is not None and overridden(data, self._library.LightningDataModule, [hook]):
                owner = data
            batch = getattr(owner, hook)(batch, 0)
        return batch

    # --- optimizer --------------------------------------------------------------------------------

    def optimizer(self, parameters: ModelParameters) -> Optimizer:
        """The optimizer that `configure_optimizers` returns for a module."""
        module: Any = parameters.module
        with self._stand_in.attached(module, parameters.run):
            found = module.configure_optimizers()
        optimizer, paces = read_optimizers(found, self._arguments.accumulation)
        self._paced[optimizer] = (paces, parameters.run)
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The schedules that came with the optimizer; None if there are none."""
        paces, run = self._paced[optimizer]
        if not paces:
            return None
        if run.epoch_steps is None and any(pace.by_epoch for pace in paces):
            raise JobError(
                "a schedule moves once an epoch, and the length of the data set is not known",
                code="W5-294",
                fix='return it with "interval": "step" from configure_optimizers',
            )
        return PacedSchedules(optimizer, paces, run)

    # --- the run ----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The settings that the arguments of the Trainer mean."""
        batches = None
        if self._arguments.wants_epoch_batches:
            batches = len(self._data.train_loader(self._first))
        return self._arguments.settings(batches)

    @property
    def validates(self) -> bool:
        """Whether Lightning would validate while it trains."""
        base = self._library.LightningModule
        has_loader = self._data.has_validation or overridden(self._first, base, ["val_dataloader"])
        return self._arguments.validates and bool(
            has_loader and overridden(self._first, base, ["validation_step"])
        )

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """The metrics that Lightning's own validation finds."""
        loaders = self._data.validation_loaders(self._first)
        return validate(module, self._library, self._arguments, loaders, self._data.module)

    def callbacks(self) -> Iterable[Callback]:
        """What follows the run for the callbacks and loggers of the Trainer."""
        return make_callbacks(self._arguments, self._first, self._library, self._stand_in.book)


def _is_lightning_module(kind: type) -> bool:
    return kind.__name__ == "LightningModule" and kind.__module__.startswith(_PACKAGES)


def _library_of(module: Any) -> ModuleType:
    """The package of a module's base class: `lightning.pytorch` or `pytorch_lightning`."""
    base = next(kind for kind in type(module).__mro__ if _is_lightning_module(kind))
    return sys.modules[next(name for name in _PACKAGES if base.__module__.startswith(f"{name}."))]


def _metric_class() -> type | None:
    """The class of torchmetrics' metrics; None if no module can have one."""
    return getattr(sys.modules.get("torchmetrics"), "Metric", None)


def _index_use(module: Any) -> tuple[bool, bool]:
    """Whether `training_step` takes the number of its batch, and whether it uses it.

    A step that does not use it can be recorded: it is the same computation for each batch.
    """
    function = inspect.unwrap(type(module).training_step)
    given = inspect.getfullargspec(function)
    names = given.args[1:]
    if "dataloader_iter" in names:
        raise JobError(
            f"{type(module).__name__}.training_step takes dataloader_iter",
            code="W5-293",
            why="it would read batches itself, and batches are lent to nodes",
            fix=f"take batch and batch_idx; or {POOL}",
        )
    if given.varargs is not None:
        return True, True
    if len(names) < 2:
        return False, False
    mentioned = (instruction.argval for instruction in dis.get_instructions(function))
    return True, any(names[1] == each or (isinstance(each, tuple) and names[1] in each) for each in mentioned)
