"""Sets a pool up with the first batch that its caller gives, or refuses it with a JobError that says why.

The caller's model itself becomes the learner's. Each loss is tried here once, on a copy of the model, when it
is first called: so a mistake shows at the caller's line, before any node computes. Leaves the caller's random
numbers as they were. Knows nothing of nodes, sockets or threads.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.calls.call_learner import CallLearner
from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.data.parts import Part, PartSource
from w5xde.learn.job.code.offer import JobOffer
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.first_batch import Trial, try_first_batch
from w5xde.learn.job.job import describe
from w5xde.learn.job.pool_job import PoolJob
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.seeding import as_before
from w5xde.learn.model.state_memory import StatePlace
from w5xde.learn.rounds.columns import Columns
from w5xde.learn.step.sums import TreeSums
from w5xde.learn.torch_private import has_hooks
from w5xde.learn.train.flags import ModelFlags, adopt_roles
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.trust.canary import ExpectedCanary, NoCanary
from w5xde.message_types import Call
from w5xde.messages import STILL, TRAINED, Rules

_CPU = torch.device("cpu")


@dataclass(slots=True)
class PoolSetup:
    """A pool that is ready for calls, and the losses that were tried."""

    job: PoolJob
    settings: Settings
    prepared: Prepared
    learner: CallLearner
    source: PartSource
    flags: ModelFlags
    trials: dict[str, Trial]

    def call(self, loss: str, first: Part) -> Call:
        """How the parts of a call are computed, as the caller's model is now; tries a loss that is new."""
        flat = self.learner.flat
        for entry, tensor in zip(flat.blueprint.layout.entries, flat.tensors, strict=True):
            if tensor.requires_grad and entry.role != TRAINED:
                raise JobError(
                    f"{entry.name} requires a gradient now, and did not when the pool began",
                    code="W5-274",
                    why="nodes were told then which gradients to send",
                    fix="let it require one when the pool is entered; later it may be frozen and unfrozen",
                )
        if loss not in self.trials:
            trial = _try_loss(self.job, copy_of(flat.module), loss, first, self.settings)
            self._require_moving(trial, loss)
            self.trials[loss] = trial
        return call_of(loss, self.flags, self.trials[loss])

    def _require_moving(self, trial: Trial, loss: str) -> None:
        for entry in self.learner.flat.blueprint.layout.entries:
            if entry.role == STILL and entry.name in trial.changed:
                raise JobError(
                    f"loss {loss!r} changes buffer {entry.name}, which did not change in the first call",
                    code="W5-274",
                    why="nodes were told then which buffers to send",
                    fix=f"make the first call of the pool one of {loss!r}",
                )


def call_of(loss: str, flags: ModelFlags, trial: Trial) -> Call:
    return Call(loss, flags.frozen(), flags.evaluating(), trial.draws_python, trial.draws_numpy)


def prepare_pool(
    job: PoolJob,
    module: nn.Module,
    trained: set[str],
    settings: Settings,
    loss: str,
    first: Part,
    place_state: StatePlace = lambda vector, whole: None,
) -> PoolSetup:
    """Try the first call, and make the caller's model the learner's.

    `trained` are the names of the parameters whose gradients nodes will send. `place_state` may give memory
    for the state of the model, by the bytes of a vector and of the state.
    """
    _require_usable(module)
    tried = copy_of(module)
    trial = _try_loss(job, tried, loss, first, settings)
    for name, parameter in tried.named_parameters():
        parameter.requires_grad_(name in trained)
    layout = layouts.describe(tried, layouts.moving_buffers(tried, trial.changed))
    del tried
    parameters = dict(module.named_parameters())
    trained_entries = [entry.name for entry in layout.entries if entry.role == TRAINED]
    flags = ModelFlags(module, [parameters[name] for name in trained_entries])
    source = PartSource(first, BatchTypes.of(job))
    rules = Rules(
        mode="sync",
        seed=settings.seed,
        precision=settings.precision,
        threads=settings.threads,
        data="stream",
        compress=settings.directions.up,
        recording=settings.recording,
        losses=sorted(job.losses),
    )

    def make_trainer() -> Trainer:
        made = copy_of(module)
        adopt_roles(made, layout)
        return Trainer(job, FlatModel(made, layout), rules, _CPU)

    def make_columns() -> Columns:
        raise ValueError("a pool has no rounds")

    canary, trouble = None, ""
    if settings.canary:
        canary, trouble = _expect(make_trainer(), rules, source, call_of(loss, flags, trial), trial)
    source.forget_first()
    learner = CallLearner(FlatModel(module, layout, place=place_state))
    prepared = Prepared(
        learner=learner,
        source=source,
        settings=settings,
        rules=rules,
        evaluate=None,
        metrics=[],
        plateau_metric="",
        copy_model=lambda: copy_of(module),
        make_trainer=make_trainer,
        make_columns=make_columns,
        draws_torch=trial.draws_torch,
        read_seconds=0.0,
        batch_seconds=trial.batch_seconds,
        own_norm=trial.gradient_norm,
        own_step_norm=0.0,
        canary=canary,
        offer=JobOffer(reason="it is a pool, and pools never send code"),
        canary_trouble=trouble,
        sums=TreeSums(learner.vectors, learner.gauge),
    )
    return PoolSetup(job, settings, prepared, learner, source, flags, {loss: trial})


def _try_loss(job: PoolJob, tried: nn.Module, loss: str, first: Part, settings: Settings) -> Trial:
    """Compute a loss of the first part of a call, on a copy of the model; JobError if that fails."""
    with as_before():
        return try_first_batch(
            job.with_loss(loss), tried, PartSource(first, BatchTypes.of(job)), settings, None
        )


def copy_of(module: nn.Module) -> nn.Module:
    """A second instance of the caller's model, for what may leave state in it."""
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise JobError(
            f"the model cannot be copied: {describe(error)}",
            code="W5-272",
            why="nodes compute on copies of it",
            fix="keep no results of arithmetic in modules: for example, use"
            " torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm",
        ) from error


def _require_usable(module: nn.Module) -> None:
    """Refuse models whose gradients would not be those of a plain loop."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "cpu":
            raise JobError(
                f"{name} is on {tensor.device}",
                code="W5-272",
                why="nodes compute, on the devices that they have; here the optimizers step",
                fix="leave the model on the CPU here, and let nodes join with --device",
            )
        if has_hooks(tensor):
            raise JobError(
                f"{name} has a hook for its gradient, which no node would call",
                code="W5-272",
                fix="change gradients after pool.backward(…), for example with clip_grad_value_",
            )


def _expect(
    trainer: Trainer, rules: Rules, source: PartSource, call: Call, trial: Trial
) -> tuple[ExpectedCanary | None, str]:
    """Compute the canary of a pool, or say why it has none."""
    flat, entries = trainer.flat, trainer.blueprint.layout.entries
    for entry in entries:
        # Other machines run the file under other seeds, and these numbers arrive after the canary.
        if entry.role == STILL and layouts.DTYPES[entry.dtype].is_floating_point:
            return None, f"buffer {entry.name} may hold other numbers where the model is built anew"
    coarse = {entry.dtype for entry in entries if entry.role == TRAINED} & {"bfloat16", "float16"}
    is_coarse = bool(coarse) or rules.precision == "bf16"
    try:
        with as_before():
            found = ExpectedCanary(
                trainer, flat, source, draws=trial.draws_torch, is_coarse=is_coarse, call=call
            )
    except NoCanary as error:
        return None, str(error)
    return found, ""
