"""A plain program of rounds: one process, ordinary PyTorch. A pool in rounds mode must equal its bits.

Shares no code with columns, learner, hand-over or codecs: of w5xde it knows which samples make a batch, the
seed of each batch, the length of each round, and how a loss is told where it is. Differences travel as they
are (`compress="none"`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.learn.reference import Parameters, seed_all
from w5xde import Job
from w5xde.config import Settings
from w5xde.learn.data.sources import MapSource
from w5xde.learn.train.position import Position, at
from w5xde.tree import batch_seed

Tensors = dict[str, Tensor]


def train_rounds_plainly(job: Job, settings: Settings) -> nn.Module:
    """The model after all rounds."""
    seed_all(settings.seed)
    master = job.model()
    seed_all(settings.seed)
    source = MapSource(
        job.data(), batch_size=settings.batch_size, seed=settings.seed, shuffle=settings.shuffles
    )
    schedule = Schedule(job, master, rate_of(job, master, settings))
    replica = copy.deepcopy(master)
    before: dict[str, Any] | None = None
    seen: dict[str, list[Tensor]] = {}
    step = 0
    for epoch, rows in rounds_of(source.samples, settings):
        rates = [schedule.next() for _ in rows]
        place = (epoch, step, step_count(source.samples, settings))
        columns = []
        for k in range(len(rows[0])):
            batches = [row[k] for row in rows]
            columns.append(column(job, settings, source, replica, place, batches, rates, before))
        total = sum(each["samples"] for each in columns)
        weights = [each["samples"] / total for each in columns]
        moved = tree([weighted(each["moved"], w) for each, w in zip(columns, weights, strict=True)])
        statistics = tree([weighted(each["state"], w) for each, w in zip(columns, weights, strict=True)])
        with torch.no_grad():
            for name, parameter in master.named_parameters():
                if name in moved:
                    parameter.add_(moved[name])
            for passes in [each["passes"] for each in columns]:
                seen = {name: seen.get(name, []) + values for name, values in passes.items()}
            for name, buffer in master.named_buffers():
                if name in seen:
                    # The mean over every pass of the run.
                    buffer.copy_(torch.stack(seen[name]).mean(0))
                    continue
                changes = tree([{name: each["buffers"][name]} for each in columns])[name]
                if buffer.dtype is torch.bool:
                    buffer.copy_(changes)
                elif buffer.is_floating_point():
                    buffer.add_(changes / len(columns))
                else:
                    buffer.add_(changes)
            movement = {}
            theirs = dict(replica.named_parameters())
            for name, parameter in master.named_parameters():
                movement[name] = parameter - theirs[name]
                theirs[name].add_(movement[name])
            for name, buffer in replica.named_buffers():
                buffer.copy_(dict(master.named_buffers())[name])
        statistics = accumulated(job, master, before, statistics, len(rows))
        sums = [sum(row[group][0] for row in rates) for group in range(len(rates[0]))]
        before = {"movement": movement, "state": statistics, "sums": sums}
        step += len(rows)
    return master


def rate_of(job: Job, model: nn.Module, settings: Settings) -> float:
    """The factor on the learning rate: 1.5 for Adam and AdamW, unless the user says another."""
    if settings.round_rate is not None:
        return settings.round_rate
    return 1.5 if is_factored(job.optimizer(Parameters(model))) else 1.0


def rounds_of(samples: int, settings: Settings) -> Iterator[tuple[int, list[list[int]]]]:
    """`(epoch, its steps)` of each round; a step is the numbers of its batches."""
    batches, width, done = math.ceil(samples / settings.batch_size), settings.step_batches, 0
    lengths = settings.round_lengths
    assert lengths is not None
    for epoch in range(settings.epochs or 1):
        steps = [list(range(i, min(i + width, batches))) for i in range(0, batches, width)]
        while steps:
            length = lengths.most
            if lengths.growth:
                length = min(max(2, done // lengths.growth), lengths.most)
            taken = steps[:length]
            if len(taken) > 1 and len(taken[-1]) < width:
                taken.pop()  # a short last step is a round of its own
            steps = steps[len(taken) :]
            done += len(taken)
            yield epoch, taken


def step_count(samples: int, settings: Settings) -> int:
    """How many steps all rounds have."""
    return sum(len(rows) for _, rows in rounds_of(samples, settings))


class Schedule:
    """The learning rate and the momentum of each group, step after step."""

    def __init__(self, job: Job, model: nn.Module, factor: float) -> None:
        self._optimizer = job.optimizer(Parameters(copy.deepcopy(model)))
        self._scheduler = None if job.scheduler is None else job.scheduler(self._optimizer)
        self._factor = factor

    def next(self) -> list[tuple[float, float | None]]:
        groups = self._optimizer.param_groups
        found = [
            (self._factor * float(g["lr"]), g["betas"][0] if "betas" in g else g.get("momentum"))
            for g in groups
        ]
        if self._scheduler is not None:
            self._optimizer.step()  # without gradients: so that the schedule does not warn
            self._scheduler.step()
        return found


def column(
    job: Job,
    settings: Settings,
    source: MapSource,
    replica: nn.Module,
    place: tuple[int, int, int],
    batches: list[int],
    rates: list[list[tuple[float, float | None]]],
    before: dict[str, Any] | None,
) -> dict[str, Any]:
    """The steps of one column, as a plain loop makes them; `place`: its epoch, first step, and all steps."""
    epoch, step, steps = place
    model = copy.deepcopy(replica)
    optimizer = job.optimizer(Parameters(model))
    names = {parameter: name for name, parameter in model.named_parameters()}
    if before is not None:
        start_from(optimizer, names, before, step)
    samples = 0
    passes = watch_passes(model)
    for number, (i, row) in enumerate(zip(batches, rates, strict=True)):
        batch = source.read(epoch, i)
        seed_all(batch_seed(settings.seed, epoch, i))
        optimizer.zero_grad(set_to_none=True)
        here = at(Position(step + number, epoch, i, steps))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.precision == "bf16"), here:
            loss = job.loss(model, batch)
        loss.backward()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        for group, (rate, momentum) in zip(optimizer.param_groups, row, strict=True):
            group["lr"] = rate
            if "betas" in group:
                group["betas"] = (momentum, group["betas"][1])
            elif "momentum" in group:
                group["momentum"] = momentum
        optimizer.step()
        samples += min(settings.batch_size, source.samples - i * settings.batch_size)
    first = {**dict(replica.named_parameters()), **dict(replica.named_buffers())}
    buffers = {
        name: buffer.clone() if buffer.dtype is torch.bool else buffer - first[name]
        for name, buffer in model.named_buffers()
    }
    return {
        "samples": samples,
        "moved": {n: p.detach() - first[n].detach() for n, p in model.named_parameters() if p.requires_grad},
        "buffers": buffers,
        "passes": passes,
        "state": summary(optimizer, names, before, len(batches)),
    }


def watch_passes(model: nn.Module) -> dict[str, list[Tensor]]:
    """By the name of a statistic that averages all batches: its value for each pass that comes."""
    found: dict[str, list[Tensor]] = {}

    def watch(path: str, norm: nn.BatchNorm1d) -> None:
        means, variances = found[f"{path}.running_mean"], found[f"{path}.running_var"] = [], []

        def note(module: nn.Module, given: tuple[Tensor]) -> None:
            means.append(given[0].detach().mean(0))
            variances.append(given[0].detach().var(0))

        norm.register_forward_pre_hook(note)

    for path, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d) and module.momentum is None:
            watch(path, module)
    return found


def summary(
    optimizer: Optimizer, names: dict[Tensor, str], before: dict[str, Any] | None, steps: int
) -> Tensors:
    """What goes on to the next round: of Adam what the round adds to rows and columns of second moments."""
    found: Tensors = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        if is_factored(optimizer):
            decay, v = math.prod([beta2(optimizer, parameter)] * steps), state["exp_avg_sq"]
            parts = {name: v}
            if v.dim() > 1 and v.shape[0] + v[0].numel() < v.numel():
                v = v.reshape(v.shape[0], -1)
                parts = {f"{name}/rows": v.mean(1), f"{name}/columns": v.mean(0)}
            for key, value in parts.items():
                old = before["state"].get(key) if before is not None else None
                fresh = value if old is None else value - decay * old
                found[key] = (fresh / (1 - decay)).clamp(min=0.0)
        elif type(optimizer) is not SGD:
            for key, value in state.items():
                if key != "step":
                    found[f"{name}/{key}"] = value.clone()
    return found


def accumulated(
    job: Job, model: nn.Module, before: dict[str, Any] | None, statistics: Tensors, steps: int
) -> Tensors:
    """The statistics of all rounds."""
    optimizer = job.optimizer(Parameters(model))
    if not is_factored(optimizer):
        return statistics
    parameters = dict(model.named_parameters())
    found = {}
    for key, fresh in statistics.items():
        decay = math.prod([beta2(optimizer, parameters[key.split("/")[0]])] * steps)
        found[key] = fresh * (1 - decay)
        if before is not None and key in before["state"]:
            found[key] = found[key] + decay * before["state"][key]
    return found


def is_factored(optimizer: Optimizer) -> bool:
    return type(optimizer) in (Adam, AdamW) and not optimizer.param_groups[0]["amsgrad"]


def beta2(optimizer: Optimizer, parameter: Tensor) -> float:
    for group in optimizer.param_groups:
        if any(each is parameter for each in group["params"]):
            return float(group["betas"][1])
    raise LookupError("a parameter that the optimizer does not have")


def start_from(optimizer: Optimizer, names: dict[Tensor, str], before: dict[str, Any], step: int) -> None:
    """Give the optimizer the state that the round before left."""
    for group, rate in zip(optimizer.param_groups, before["sums"], strict=True):
        for parameter in group["params"]:
            name = names[parameter]
            statistics = {k: v for k, v in before["state"].items() if k.split("/")[0] == name}
            moved = before["movement"][name] / -rate if rate else torch.zeros_like(parameter)
            if type(optimizer) is SGD:
                if group["momentum"]:
                    optimizer.state[parameter] = {"momentum_buffer": moved}
            elif not statistics or not any(bool(each.any()) for each in statistics.values()):
                continue
            elif f"{name}/rows" in statistics or name in statistics:
                v = statistics.get(name)
                if v is None:
                    rows, columns = statistics[f"{name}/rows"], statistics[f"{name}/columns"]
                    v = torch.outer(rows, columns / rows.mean()).view(parameter.shape)
                beta1, beta2 = group["betas"]
                m = (v / (1 - beta2**step)).sqrt().add(group["eps"]).mul(moved).mul(0.8 * (1 - beta1**step))
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)), "exp_avg": m, "exp_avg_sq": v.clone(),
                }  # fmt: skip
            else:
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    **{k.split("/")[1]: v.clone() for k, v in statistics.items()},
                }


def weighted(tensors: Tensors, weight: float) -> Tensors:
    return {name: tensor * weight for name, tensor in tensors.items()}


def tree(values: list[Tensors]) -> Tensors:
    """The sum in pairs: the left half of a power of two, and the rest."""
    if len(values) == 1:
        return values[0]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    left, right = tree(values[:half]), tree(values[half:])
    return {
        name: left[name] | right[name] if left[name].dtype is torch.bool else left[name] + right[name]
        for name in left
    }
