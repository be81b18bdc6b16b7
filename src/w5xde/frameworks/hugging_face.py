"""Hugging Face: a `Trainer` as a job. The job's functions call the Trainer's own methods.

The Trainer's loop does not run: its model, data, loss, optimizer and schedule are read from it, in every
process. Knows nothing of nodes; what its arguments mean is in `hugging_face_arguments`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from w5xde.callbacks import Callback
from w5xde.errors import JobError
from w5xde.frameworks.hugging_face_arguments import refuse_arguments, settings_of
from w5xde.frameworks.hugging_face_callbacks import make_callbacks
from w5xde.frameworks.models import HandedOut, on_behalf_of, require_function
from w5xde.frameworks.refusals import TRAINER_METHODS, missing_library, overridden, refuse_hooks
from w5xde.learn.job.job import Job
from w5xde.learn.model.device import threads
from w5xde.specs.planned_run import PlannedRun

if TYPE_CHECKING:
    from w5xde.learn.job.build import ModelParameters


def from_trainer(build: Callable[[], Any]) -> Job:
    """The job that a Hugging Face Trainer declares: `from_trainer(lambda: Trainer(…))`.

    Every process of a run calls the function. The arguments of the Trainer become the defaults of the run's
    settings, which flags, variables and w5xde.toml override.
    """
    require_function("from_trainer", build, "from_trainer(lambda: Trainer(…))")
    recipe = TrainerRecipe(build)
    return Job(
        model=on_behalf_of(build, recipe.model),
        data=recipe.data,
        loss=recipe.loss,
        weight=recipe.weight,
        optimizer=recipe.optimizer,
        scheduler=recipe.scheduler,
        evaluate=recipe.evaluate if recipe.evaluates else None,
        settings=recipe.settings,
        callbacks=recipe.callbacks,
    )


class TrainerRecipe:
    """The parts of a job, from a Trainer that is built once in each process."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._trainer = self._new_trainer()
        refuse_arguments(self._trainer.args)
        self._settings = settings_of(self._trainer.args, self._epoch_batches)
        self._handed_out = HandedOut()
        self._trained: nn.Module = self._trainer.model
        # Optimizers and schedules that the user gave to the Trainer of a model.
        self._given: WeakKeyDictionary[nn.Module, tuple[Any, Any]] = WeakKeyDictionary()
        self._planned: WeakKeyDictionary[Optimizer, tuple[PlannedRun, nn.Module]] = WeakKeyDictionary()

    def _new_trainer(self) -> Any:
        try:
            # Other processes are forked from this one, and must not inherit threads that are computing.
            with threads(1):
                trainer = self._build()
        except ImportError as error:
            raise missing_library(error, "hf") from error
        kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
        if kind is None or not isinstance(trainer, kind):
            raise JobError(
                f"from_trainer was given a function that returns a {type(trainer).__name__}",
                code="W5-291",
                fix="return a transformers.Trainer:  from_trainer(lambda: Trainer(model_init=…, args=…, …))",
            )
        if found := overridden(trainer, kind, TRAINER_METHODS):
            raise refuse_hooks(trainer, TRAINER_METHODS, found, "override compute_loss instead; or ")
        return trainer

    # --- model and data ---------------------------------------------------------------------------

    def model(self) -> nn.Module:
        """A new instance of the model, prepared as the Trainer prepares it for training."""
        if self._trainer.model_init is not None:
            return self._prepare(self._trainer.call_model_init())
        # Built anew under the seed of the run; one that exists outside of the function comes again.
        trainer = self._new_trainer()
        model: nn.Module = self._handed_out.take(trainer.model)
        if trainer.optimizer is not None and model is trainer.model:
            self._given[model] = (trainer.optimizer, trainer.lr_scheduler)
        return self._prepare(model)

    def _prepare(self, model: Any) -> nn.Module:
        arguments, processing = self._trainer.args, self._trainer.processing_class
        if arguments.gradient_checkpointing:
            options = dict(arguments.gradient_checkpointing_kwargs or {})
            chosen = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **chosen)
        if _is_text_processor(processing) and hasattr(model, "config"):
            from transformers.trainer_utils import align_special_tokens

            align_special_tokens(model, processing)
        prepared: nn.Module = model
        return prepared

    def data(self) -> Any:
        """The Trainer's own loader of training batches, without what accelerate adds."""
        loader = self._loader()
        made: dict[str, Any] = {
            "batch_size": self._trainer.args.per_device_train_batch_size,
            "collate_fn": loader.collate_fn,
            "num_workers": self._trainer.args.dataloader_num_workers,
            "drop_last": self._trainer.args.dataloader_drop_last,
        }
        if not isinstance(loader.dataset, IterableDataset):
            made["sampler"] = loader.batch_sampler.sampler
        return DataLoader(loader.dataset, **made)

    def _loader(self) -> Any:
        return self._trainer.get_train_dataloader()

    @property
    def _epoch_batches(self) -> int | None:
        """Batches of an epoch; None if the data set is a stream."""
        try:
            samples = len(self._trainer.train_dataset)
        except TypeError:
            return None
        size = int(self._trainer.args.per_device_train_batch_size)
        return samples // size if self._trainer.args.dataloader_drop_last else -(-samples // size)

    # --- loss -------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss of a batch, over its tokens where the Trainer counts tokens."""
        inputs = _inputs(batch)
        items = self._items(inputs)
        found: Tensor = self._trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return found

    def weight(self, batch: Any) -> float:
        """What a batch weighs in its step: its tokens, or 1 where the Trainer takes the mean of batches."""
        counted = self._count(_inputs(batch))
        is_scaled = self._trainer.loss_is_scaled_for_ga
        if is_scaled is None:
            counts = self._trainer.model_accepts_loss_kwargs and counted is not None
            is_scaled = counts or self._trainer.compute_loss_func is not None
        if not is_scaled:
            return 1.0
        if counted is None:
            raise JobError(
                "the loss is divided by the number of items of a step, and this batch has no labels to count",
                code="W5-295",
                fix="set loss_is_scaled_for_ga = False in your Trainer, if the loss is the mean of a batch",
            )
        return float(counted)

    def _items(self, inputs: dict[str, Any]) -> Any:
        """The number by which the loss of a batch is divided; at least 1, so that a masked batch is 0."""
        counted = self._count(inputs)
        return counted.clamp(min=1) if isinstance(counted, Tensor) else counted

    def _count(self, inputs: dict[str, Any]) -> Any:
        """As the Trainer counts the items of a step that has this batch alone; None if it does not count."""
        labels = inputs.get("labels")
        device = labels.device if isinstance(labels, Tensor) else torch.device("cpu")
        return self._trainer.get_batch_samples(iter([inputs]), 1, device)[1]

    # --- optimizer --------------------------------------------------------------------------------

    def optimizer(self, parameters: ModelParameters) -> Optimizer:
        """The optimizer that the Trainer creates for a model, or that it was given with the model."""
        trainer, module = self._trainer, parameters.module
        if trainer.model_init is None and trainer.optimizer is not None:
            optimizer = self._given_to(module)
        else:
            trainer.model, trainer.optimizer = module, None
            optimizer = trainer.create_optimizer()
            trainer.optimizer = None
        self._planned[optimizer] = (parameters.run, module)
        # The last one that is asked for at the coordinator is that of the model it trains.
        self._trained = module
        return optimizer

    def _given_to(self, module: nn.Module) -> Optimizer:
        if module not in self._given:
            raise JobError(
                "Trainer(optimizers=…) has the optimizer of one model, and this mode needs that of a copy",
                code="W5-294",
                fix="use --mode sync, or give optimizer_cls_and_kwargs=(AdamW, {…}) instead",
            )
        optimizer: Optimizer = self._given[module][0]
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> Any:
        """The schedule that the Trainer creates for the steps of this run, or that it was given."""
        run, module = self._planned[optimizer]
        given = self._given.get(module, (None, None))[1]
        if given is not None:
            return given
        if run.steps is None:
            raise JobError(
                "the Trainer's schedule needs the number of steps, and that of this run is not known",
                code="W5-294",
                fix="say it: TrainingArguments(max_steps=…), or --steps",
            )
        trainer = self._trainer
        trainer.lr_scheduler = None
        return trainer.create_scheduler(num_training_steps=run.steps, optimizer=optimizer)

    # --- the run ----------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        return self._settings

    @property
    def evaluates(self) -> bool:
        """Whether the Trainer would evaluate while it trains."""
        strategy = self._trainer.args.eval_strategy
        return str(getattr(strategy, "value", strategy)) != "no" and self._trainer.eval_dataset is not None

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The metrics that the Trainer's evaluation loop finds."""
        trainer = self._trainer
        names = list(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else [None]
        found: dict[str, float] = {}
        forward = vars(model).get("forward")
        trainer.model = trainer.model_wrapped = model
        # As in the middle of training: otherwise it may change the dtype of the model.
        trainer.is_in_train = True
        for name in names:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=trainer.args.bf16):
                output = trainer.evaluation_loop(
                    trainer.get_eval_dataloader(name),
                    description="Evaluation",
                    prediction_loss_only=True if trainer.compute_metrics is None else None,
                    metric_key_prefix="eval" if name is None else f"eval_{name}",
                )
            found |= {key: float(value) for key, value in output.metrics.items() if _is_number(value)}
        if forward is None:
            # accelerate may have wrapped it.
            vars(model).pop("forward", None)
        return {key: value for key, value in found.items() if not key.endswith("_model_preparation_time")}

    def callbacks(self) -> Iterable[Callback]:
        """What follows the run for the Trainer's callbacks and loggers."""
        return make_callbacks(self._trainer, lambda: self._trained)


def _inputs(batch: Any) -> dict[str, Any]:
    """The inputs of the model; a copy, because the Trainer takes labels out of it."""
    if not isinstance(batch, Mapping):
        raise JobError(
            f"a batch of the Trainer is a {type(batch).__name__}, not a dict of the model's inputs",
            code="W5-295",
            fix="let the data set return dicts, or the data_collator make one",
        )
    return dict(batch)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text_processor(processing: Any) -> bool:
    if processing is None:
        return False
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    return isinstance(processing, PreTrainedTokenizerBase | ProcessorMixin)
