"""Contestants that send little, over gloo: PyTorch's own ways to train over slow links, and DiLoCo.

    ddp             DistributedDataParallel: all gradients, in every step
    ddp-bf16        the same in half the bytes
    powersgd-RANK   PyTorch's hook: gradients as products of thin matrices
    local-N         PyTorch's post-local SGD: each process alone, and the mean of all models every N steps
    diloco-N        DiLoCo: the same, but an outer optimizer with momentum steps along the mean difference
    average-N       DiLoCo's loop with plain averages

All learn from the same batches with the same inner optimizer. Knows nothing of links or namespaces.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from w5xde.bench.contestants.ddp import data_parallel, keep, send_bf16
from w5xde.bench.contestants.learners import Step, training_step
from w5xde.learn.job.job import Job

# Steps with whole gradients before PowerSGD and post-local SGD begin. PyTorch's examples take a thousand and
# more, which would be most of a run here; PowerSGD needs two.
WHOLE_STEPS, WHOLE_STEPS_MIN = 10, 2
# The outer optimizer of the DiLoCo paper (arXiv 2311.08105): SGD with Nesterov's momentum.
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(slots=True)
class Method:
    """How one of several processes learns: from a batch, and from the others after every `period` steps."""

    step: Step
    period: int = 1
    exchange: Callable[[], None] | None = None
    steps: int = 0
    # CPU time of the thread that computes: waiting for the others is not in it.
    seconds_computing: float = 0.0

    def __call__(self, batch: Any) -> float:
        began = time.thread_time()
        loss = self.step(batch)
        self.seconds_computing += time.thread_time() - began
        self.steps += 1
        if self.exchange is not None and self.steps % self.period == 0:
            self.exchange()
        return loss


@dataclass(frozen=True, slots=True)
class MethodStart:
    """What a method begins with: a model, the same in all processes, and steps with whole gradients."""

    job: Job
    model: nn.Module
    whole_steps: int = WHOLE_STEPS


def method_of(name: str, start: MethodStart) -> Method:
    """The method of this name."""
    family, _, number = name.partition("-")
    return METHODS[family](start, number)


def _ddp(start: MethodStart, kind: str) -> Method:
    parallel = data_parallel(start.model)
    if kind == "bf16":
        send_bf16(parallel)
    return Method(training_step(start.job, parallel))


def _power_sgd(start: MethodStart, rank: str) -> Method:
    parallel = data_parallel(start.model)
    state = power.PowerSGDState(
        process_group=None, matrix_approximation_rank=int(rank), start_powerSGD_iter=start.whole_steps
    )
    parallel.register_comm_hook(state, power.powerSGD_hook)
    return Method(training_step(start.job, parallel))


def _post_local_sgd(start: MethodStart, period: str) -> Method:
    # Imported here, because that compiles ten other optimizers, and warns that it does.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import PostLocalSGDOptimizer

    parallel, every = data_parallel(start.model), int(period)
    # The averager takes its first mean one step later: so all means fall on multiples of the period.
    before_first_mean = every * -(-start.whole_steps // every) - 1
    # Afterwards gradients stay in each process.
    state = post_local.PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None,
        subgroup=None,
        start_localSGD_iter=start.whole_steps,
        post_local_gradient_allreduce=False,
    )
    parallel.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=before_first_mean)
    optimizer = PostLocalSGDOptimizer(optim=start.job.optimizer(parallel.parameters()), averager=averager)
    return Method(training_step(start.job, parallel, optimizer), every)


def _diloco(start: MethodStart, period: str) -> Method:
    return _with_outer_steps(start, int(period), OUTER_RATE, OUTER_MOMENTUM)


def _averaging(start: MethodStart, period: str) -> Method:
    return _with_outer_steps(start, int(period), 1.0, 0.0)


def _with_outer_steps(start: MethodStart, period: int, rate: float, momentum: float) -> Method:
    """Inner steps in each process, and after `period` of them an outer step along the mean difference."""
    model = start.model
    shared = parameters_to_vector(model.parameters()).detach().clone().requires_grad_()
    outer = torch.optim.SGD([shared], lr=rate, momentum=momentum, nesterov=momentum > 0)

    def exchange() -> None:
        difference = shared.detach() - parameters_to_vector(model.parameters()).detach()
        # One message for the whole model: the fewest round trips.
        dist.all_reduce(difference)
        shared.grad = difference / dist.get_world_size()
        outer.step()
        # A copy: or the parameters would be parts of the shared vector, and inner steps would change that.
        vector_to_parameters(shared.detach().clone(), model.parameters())

    keep(exchange)
    return Method(training_step(start.job, model), period, exchange)


METHODS: dict[str, Callable[[MethodStart, str], Method]] = {
    "ddp": _ddp,
    "powersgd": _power_sgd,
    "local": _post_local_sgd,
    "diloco": _diloco,
    "average": _averaging,
}
