"""The trial: the coordinator computes the first batch itself, before it uses any node.

It refuses a wrong loss or label type at once, and finds out which buffers a batch changes (these travel) and
which random generators it draws from (these are seeded). Leaves the model as it was. Knows nothing of nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from w5xde.config import Settings
from w5xde.errors import JobError
from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.data.payload import Packer, unpack
from w5xde.learn.data.sources import MapSource, Source
from w5xde.learn.job.job import Job, describe
from w5xde.learn.job.python_state import PythonState
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.device import to_device
from w5xde.learn.model.seeding import DrawnFrom, seed_everything
from w5xde.learn.torch_private import write_count
from w5xde.learn.train.position import Position, at
from w5xde.messages import Layout
from w5xde.tree import batch_seed

# How many attributes a message names.
STATE_NAMES_MAX = 3
# Words of torch's errors about tensors of different types.
_ABOUT_DTYPES = ("dtype", "scalar type", "type (", "must have the type")
_TRAINS_NOTHING = (
    "the loss does not depend on any parameter of the model that is trained",
    "compute it from the model that it is given, model(…), without torch.no_grad() or .detach()",
)


@dataclass(slots=True)
class Trial:
    """What the first batch showed: the buffers it changed, the generators it drew from, and its seconds."""

    changed: set[str]
    draws_python: bool
    draws_numpy: bool
    draws_torch: bool
    read_seconds: float
    # To compute; in sync mode measured the second time, when everything is warm.
    batch_seconds: float
    # Of the whole gradient, on the initial weights.
    gradient_norm: float


def try_first_batch(
    job: Job, module: nn.Module, source: Source, settings: Settings, steps: int | None
) -> Trial:
    """Read, send and compute the first batch as a node would; JobError if the job cannot be trained.

    `steps` is how many the run has, for a loss that asks.
    """
    seed = batch_seed(settings.seed, 0, 0)
    seed_everything(seed)
    drawn = DrawnFrom()
    started = time.perf_counter()
    batch = _first_batch(source)
    read_seconds = time.perf_counter() - started
    source.draws = drawn.torch or drawn.python or drawn.numpy
    sent = _sender(batch, source.recipe.types)
    parameters = {name: _TensorBefore(parameter) for name, parameter in module.named_parameters()}
    buffers = {name: _TensorBefore(buffer) for name, buffer in module.named_buffers()}

    def compute() -> float:
        with at(Position(0, 0, 0, steps)):
            return _first_loss(job, module, sent(), settings.precision)

    seed_everything(seed)
    drawn = DrawnFrom()
    started = time.perf_counter()
    loss = compute()
    batch_seconds = time.perf_counter() - started
    draws_python, draws_numpy, draws_torch = drawn.python, drawn.numpy, drawn.torch
    gradient_norm = _check_gradients(module)
    _check_parameters(module, parameters)
    changed = _changed_buffers(module, buffers)
    if settings.mode != "async" or settings.verify:
        state = PythonState(module, job.loss)

        def compute_again() -> float:
            module.zero_grad(set_to_none=True)
            seed_everything(seed)
            return compute()

        started = time.perf_counter()
        again = compute_again()
        batch_seconds = time.perf_counter() - started
        _refuse_python_state(lambda: PythonState(module, job.loss), state, compute_again)
        _check_repeatable(loss, again)
    return Trial(changed, draws_python, draws_numpy, draws_torch, read_seconds, batch_seconds, gradient_norm)


def _refuse_python_state(
    look: Callable[[], PythonState], first: PythonState, compute: Callable[[], float]
) -> None:
    """Refuse state that changes each time the same batch is computed; `first`: after the first time.

    State that settles, such as a cache or a flag, is not refused.
    """
    second = look()
    suspects = second.changed_since(first)
    if not suspects:
        return
    compute()
    found = sorted(suspects & look().changed_since(second))
    if found:
        names = ", ".join(found[:STATE_NAMES_MAX]) + (" and others" if len(found) > STATE_NAMES_MAX else "")
        raise JobError(
            f"every batch changes {names}, which no buffer holds",
            code="W5-243",
            why="every node would count the batches that it computes itself, so that the weights would depend"
            " on which nodes helped",
            fix="keep it in a buffer of the model (self.register_buffer); or, in place of a counter of your"
            " own, read w5xde.current().step; or use --mode async without --verify",
        )


def _check_repeatable(first: float, second: float) -> None:
    # Far more than rounding differs, far less than state between batches or a private generator causes.
    if not math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-6):
        raise JobError(
            f"the loss is {first:.6g} and then {second:.6g} for the same batch under the same seed",
            code="W5-231",
            why="it depends on what was computed before, or on a random generator of its own,"
            " so each machine would train another model",
            fix="keep such state in a buffer (register_buffer), read w5xde.current().step in place of a"
            " counter, draw from torch's global generator, or use --mode async without --verify",
        )


class _TensorBefore:
    """A parameter or buffer as it was before the first batch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.values = tensor.detach().clone()
        self._version = write_count(tensor)
        self._place = tensor.data_ptr() if tensor.layout is torch.strided else 0

    def is_written(self, now: Tensor) -> bool:
        """Whether it was written to or replaced, in any way that torch allows."""
        if now is not self.tensor or now.layout is not torch.strided:
            return not self.is_same(now)
        # Writing through .data does not change the version, assigning .data need not change the values.
        return write_count(now) != self._version or now.data_ptr() != self._place or not self.is_same(now)

    def is_same(self, now: Tensor) -> bool:
        if now.layout is not torch.strided:
            return True  # a sparse cache; persistent buffers are never sparse
        return self.is_alike(now) and not bool(self.differing(now).any())

    def is_alike(self, now: Tensor) -> bool:
        return now.shape == self.values.shape and now.dtype == self.values.dtype

    def differing(self, now: Tensor) -> Tensor:
        """Which elements differ; NaN equals NaN."""
        return (now != self.values) & ~((now != now) & (self.values != self.values))


def _check_parameters(module: nn.Module, before: dict[str, _TensorBefore]) -> None:
    for name, parameter in module.named_parameters():
        if name not in before:
            raise JobError(
                f"parameter {name} is created only when the model is first used",
                code="W5-221",
                fix="run one batch through the model inside model() before you return it",
            )
        if parameter is not before[name].tensor or before[name].is_written(parameter):
            raise JobError(
                f"the loss changes parameter {name} itself",
                code="W5-224",
                why="every batch of a step must be computed on the same parameters",
                fix="leave changing parameters to the optimizer",
            )


def _first_batch(source: Source) -> Any:
    if isinstance(source, MapSource):
        return source.read(0, 0)
    for _, batch in source.epoch(0):
        return batch
    raise JobError("the data set is empty", code="W5-204", fix="data() must give at least one sample")


def _sender(batch: Any, types: BatchTypes) -> Callable[[], Any]:
    """A function that returns a new copy of the batch as nodes get it; refuses one that cannot be sent."""
    packer = Packer(types)
    item = packer.pack(batch)
    body = bytearray(b"".join(packer.pieces))
    return lambda: to_device(unpack(item, body, types=types), torch.device("cpu"))


def _first_loss(job: Job, module: nn.Module, batch: Any, precision: str) -> float:
    """Compute loss and gradients of the first batch; JobError if that is impossible."""
    problem = None
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = job.loss(module, batch)
        problem = _loss_problem(loss)
        if problem is None:
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.detach())
    except Exception as error:
        what = "the loss failed on the first batch, before any node was used"
        fix = _hint(str(error), module, batch)
        raise JobError(what, code="W5-205", why=describe(error), fix=fix) from error
    what, fix = problem
    raise JobError(what, code="W5-205", fix=fix)


def _loss_problem(loss: Any) -> tuple[str, str] | None:
    """What is wrong with a loss, and how to fix it; None if it can be minimised."""
    if not isinstance(loss, Tensor):
        return f"the loss returned a {type(loss).__name__}, not a tensor", (
            "return the loss as a tensor (without .item())"
        )
    if loss.numel() != 1:
        return f"the loss has shape {tuple(loss.shape)}, not one number", (
            "return a scalar, for example loss.mean()"
        )
    if loss.is_complex():
        return "the loss is complex", "return a real number, for example loss.abs()"
    if not math.isfinite(value := float(loss.detach())):
        return f"the loss is {value} on the first batch", (
            "look at the inputs (NaN in the data?), the initial weights, or a log of zero"
        )
    if not loss.requires_grad:
        return _TRAINS_NOTHING
    return None


def _hint(text: str, module: nn.Module, batch: Any) -> str:
    wide = _wide_member(module, batch)
    if wide and "Long" not in text and any(word in text for word in _ABOUT_DTYPES):
        return (
            f"{wide} is float64, numpy's usual type, and the model is float32: give float32 in the data set"
            " (x.astype(np.float32), or x.float()), or make the model float64 (model.double())"
        )
    if "Long" in text or "expected scalar type" in text or "target" in text:
        return (
            "check the type of the labels: class numbers must be integers (y.long()),"
            " targets floats (y.float())"
        )
    if "mat1 and mat2" in text or "size" in text or "shape" in text:
        return "check that the shape of the batch fits the model"
    return "call loss(model(), batch) on one batch by hand to see the whole error"


def _wide_member(module: nn.Module, batch: Any) -> str:
    """The first member of a batch that is float64 while no parameter is; empty if there is none."""
    if any(parameter.dtype is torch.float64 for parameter in module.parameters()):
        return ""
    return next((where for where, each in _tensors_in(batch, "batch") if each.dtype is torch.float64), "")


def _tensors_in(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors_in(item, f"{where}[{i}]")


def _check_gradients(module: nn.Module) -> float:
    """Refuse gradients that cannot travel, or that no parameter has; return the norm of the others."""
    norms = []
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise JobError(
                f"the gradient of {name} is sparse",
                code="W5-225",
                fix="build the embedding with sparse=False (gradients travel as one dense vector)",
            )
        if parameter.grad is not None:
            norms.append(float(torch.linalg.vector_norm(parameter.grad)))
    if not norms:
        what, fix = _TRAINS_NOTHING
        raise JobError(what, code="W5-205", fix=fix)
    return math.hypot(*norms)


def _changed_buffers(module: nn.Module, before: dict[str, _TensorBefore]) -> set[str]:
    """Names of the persistent buffers that the first batch wrote to; restores all buffers."""
    persistent = set(module.state_dict(keep_vars=True))
    written = set()
    for name, buffer in list(module.named_buffers()):
        kept = before.get(name)
        if kept is None or not kept.is_alike(buffer):
            if name not in persistent:
                continue  # a cache that grows is no state of the model
            raise JobError(
                f"buffer {name} changes its shape or dtype while training",
                code="W5-226",
                fix="register it with persistent=False if it is a cache, or give it its full shape at once",
            )
        if kept.is_written(buffer):
            if name in persistent:
                _refuse_without_differences(name, kept, buffer)
                written.add(name)
            elif not kept.is_same(buffer):
                raise JobError(
                    f"buffer {name} changes while training but is not persistent",
                    code="W5-226",
                    why="it would differ from node to node and never reach the trained model",
                    fix="register it with persistent=True",
                )
        # Restore the tensor object too: an assigned one may be a view of something else.
        owner, _, local = name.rpartition(".")
        setattr(module.get_submodule(owner), local, kept.tensor)
        if not kept.is_same(kept.tensor):
            with torch.no_grad():
                kept.tensor.copy_(kept.values)
    return written


def _refuse_without_differences(name: str, kept: _TensorBefore, now: Tensor) -> None:
    """Refuse a buffer whose change cannot be sent as a difference: from NaN or infinity there is none."""
    if not layouts.has_differences(kept.values):
        raise JobError(
            f"buffer {name} changes while training but holds NaN, or numbers torch cannot add"
            f" ({layouts.dtype_name(now.dtype)})",
            code="W5-226",
            fix="give it finite numbers of an ordinary dtype to start with",
        )
    endless = kept.values[kept.differing(now) & ~torch.isfinite(kept.values)]
    if endless.numel():
        raise JobError(
            f"buffer {name} starts at {endless[0].item()} and changes while training",
            code="W5-226",
            why="a buffer moves by the mean of its differences in the batches of a step",
            fix="let it start at a finite number, for example 0",
        )


def refuse_unsavable(layout: Layout) -> None:
    """Refuse a dtype that model.safetensors cannot hold now, rather than when training is over."""
    for entry in layout.entries:
        try:
            save({"": torch.empty(0, dtype=layouts.DTYPES[entry.dtype])})
        except KeyError:
            raise JobError(
                f"{entry.name} is {entry.dtype}, which a safetensors file cannot hold",
                code="W5-230",
                fix="use a smaller dtype (complex64), or two real tensors",
            ) from None
