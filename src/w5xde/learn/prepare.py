"""From a job to something that can be trained, or a sentence that says why not.

The coordinator tries the first batch itself, so that a wrong loss or label type is told before any node
is used; nodes build their own copy and check that it is the same model and the same data.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from w5xde.config import Settings
from w5xde.errors import JobError, JoinError, UsageError
from w5xde.learn import layout as layouts
from w5xde.learn.data import MapSource, Source, open_source
from w5xde.learn.job import Job, describe
from w5xde.learn.layout import FlatModel
from w5xde.learn.learner import Learner
from w5xde.learn.payload import Packer, unpack
from w5xde.learn.seeding import DrawnFrom, seed_everything
from w5xde.learn.trainer import Trainer
from w5xde.messages import MOVING, Layout, Rules, Welcome
from w5xde.tree import batch_seed


class ModelParameters(list[nn.Parameter]):
    """What `optimizer(params)` gets: the parameters, and their names for those who make groups."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters())
        self._module = module

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._module.named_parameters()


@dataclass(slots=True)
class Prepared:
    """Everything the coordinator needs of a job."""

    learner: Learner
    source: Source
    rules: Rules
    evaluate: Callable[[nn.Module], dict[str, float]] | None
    first_loss: float
    # How long the first batch took to read, which decides where batches are read.
    read_seconds: float


def prepare(job: Job, settings: Settings) -> Prepared:
    """Build model, data and optimizer and try the first batch."""
    module = build_model(job, settings.seed)
    source = build_source(job, settings.seed, settings.batch_size, settings.shuffle)
    if settings.data == "local" and not isinstance(source, MapSource):
        raise JobError(
            "--data local needs a map-style data set, and data() returned an iterable one",
            code="W5-204",
            fix="use --data stream, or return a data set with __len__ and __getitem__",
        )
    # What no batch could make right (lazy, sparse, nothing to train) is told before the first one runs.
    _refuse_unsavable(layouts.describe(module, set()))
    trial = _try_first_batch(job, _another(job, module, settings.seed), source, settings)
    moving = layouts.moving_buffers(module, trial.changed)
    flat = FlatModel(module, layouts.describe(module, moving))
    optimizer = _build_optimizer(job, module)
    scheduler = _build_scheduler(job, optimizer)
    rules = Rules(
        mode=settings.mode,
        seed=settings.seed,
        precision=settings.precision,
        threads=settings.threads,
        data=settings.data,
        seeds_python=trial.draws_python,
        seeds_numpy=trial.draws_numpy,
        data_samples=source.samples or 0,
        data_digest=source.fingerprint()
        if settings.data == "local" and isinstance(source, MapSource)
        else "",
    )
    return Prepared(
        learner=Learner(flat, optimizer, scheduler, settings.clip_norm),
        source=source,
        rules=rules,
        evaluate=_build_evaluate(job, lambda: _another(job, module, settings.seed)),
        first_loss=trial.loss,
        read_seconds=trial.read_seconds,
    )


def build_model(job: Job, seed: int) -> nn.Module:
    seed_everything(seed)
    module = _call("model()", job.model)
    if not isinstance(module, nn.Module):
        raise JobError(
            f"model() returned a {type(module).__name__}", code="W5-202", fix="return a torch.nn.Module"
        )
    if not module.training:
        # Pretrained models often come ready for evaluation. But layers that model() put in evaluation mode
        # inside a training model (frozen BatchNorm) are meant to stay there.
        module.train()
    return module


def _another(job: Job, module: nn.Module, seed: int) -> nn.Module:
    """The same model once more, to try things on: what it keeps of them is thrown away with it."""
    try:
        return copy.deepcopy(module)
    except Exception:
        # A module that holds results of arithmetic (old weight_norm does) cannot be copied, but built again.
        return build_model(job, seed)


def build_source(job: Job, seed: int, batch_size: int, shuffle: bool) -> Source:
    seed_everything(seed)
    return open_source(_call("data()", job.data), batch_size=batch_size, seed=seed, shuffle=shuffle)


def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"{what} failed: {describe(error)}", code="W5-202") from error


# --- the first batch ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Trial:
    loss: float
    changed: set[str]
    draws_python: bool
    draws_numpy: bool
    read_seconds: float


def _try_first_batch(job: Job, module: nn.Module, source: Source, settings: Settings) -> _Trial:
    seed = batch_seed(settings.seed, 0, 0)
    seed_everything(seed)
    drawn = DrawnFrom()
    started = time.perf_counter()
    batch = _first_batch(source)
    read_seconds = time.perf_counter() - started
    source.draws = drawn.torch or drawn.python or drawn.numpy
    sent = _sender(batch)
    parameters = {name: _Kept(parameter) for name, parameter in module.named_parameters()}
    buffers = {name: _Kept(buffer) for name, buffer in module.named_buffers()}
    seed_everything(seed)
    drawn = DrawnFrom()
    loss = _first_loss(job, module, sent(), settings.precision)
    draws_python, draws_numpy = drawn.python, drawn.numpy
    _check_gradients(module)
    _check_parameters(module, parameters)
    changed = _changed_buffers(module, buffers)
    if settings.mode == "sync":
        seed_everything(seed)
        _check_repeatable(loss, _first_loss(job, module, sent(), settings.precision))
    return _Trial(loss, changed, draws_python, draws_numpy, read_seconds)


def _check_repeatable(first: float, second: float) -> None:
    # Far more than rounding could differ, far less than a carried state or a generator of its own makes.
    if not math.isclose(first, second, rel_tol=1e-4, abs_tol=1e-6):
        raise JobError(
            f"the loss is {first:.6g} and then {second:.6g} for the same batch under the same seed",
            code="W5-231",
            why="it depends on what was computed before, or on a random generator of its own,"
            " so each machine would train another model",
            fix="keep such state in a buffer (register_buffer), draw from torch's global generator,"
            " or use --mode async",
        )


class _Kept:
    """A parameter or buffer as it was before the first batch."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.values = tensor.detach().clone()
        self._version = tensor._version
        self._place = tensor.data_ptr() if tensor.layout is torch.strided else 0

    def is_written(self, now: Tensor) -> bool:
        """Whether it was written to or replaced, in any of the ways torch allows."""
        if now is not self.tensor or now.layout is not torch.strided:
            return not self.is_same(now)
        # Writing through .data leaves the version alone, and giving other .data leaves the values alone.
        return now._version != self._version or now.data_ptr() != self._place or not self.is_same(now)

    def is_same(self, now: Tensor) -> bool:
        if now.layout is not torch.strided:
            return True  # a sparse cache; what is persistent is never sparse
        return self.is_alike(now) and not bool(self.differing(now).any())

    def is_alike(self, now: Tensor) -> bool:
        return now.shape == self.values.shape and now.dtype == self.values.dtype

    def differing(self, now: Tensor) -> Tensor:
        """Which elements differ; NaN is no other than NaN."""
        return (now != self.values) & ~((now != now) & (self.values != self.values))


def _check_parameters(module: nn.Module, before: dict[str, _Kept]) -> None:
    for name, parameter in module.named_parameters():
        if name not in before:
            raise JobError(
                f"parameter {name} comes into being only when the model is used",
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


def _sender(batch: Any) -> Callable[[], Any]:
    """Gives the batch as a node will see it, anew each time; making it proves that it can be sent."""
    packer = Packer()
    item = packer.pack(batch)
    body = bytearray(b"".join(packer.pieces))
    return lambda: unpack(item, body)


def _first_loss(job: Job, module: nn.Module, batch: Any, precision: str) -> float:
    what = "the loss failed on the first batch, before any node was used"
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = job.loss(module, batch)
    except Exception as error:
        raise JobError(what, code="W5-205", why=describe(error), fix=_hint(error)) from error
    if not isinstance(loss, Tensor):
        raise JobError(
            f"the loss returned a {type(loss).__name__}, not a tensor",
            code="W5-205",
            fix="return the loss as a tensor (without .item())",
        )
    if loss.numel() != 1:
        raise JobError(
            f"the loss has shape {tuple(loss.shape)}, not one number",
            code="W5-205",
            fix="return a scalar, for example loss.mean()",
        )
    if loss.is_complex():
        raise JobError(
            "the loss is complex", code="W5-205", fix="return a real number, for example loss.abs()"
        )
    value = float(loss.detach())
    if not math.isfinite(value):
        raise JobError(
            f"the loss is {value} on the first batch",
            code="W5-205",
            fix="look at the inputs (NaN in the data?), the initial weights, or a log of zero",
        )
    if not loss.requires_grad:
        raise JobError(
            "the loss does not depend on any parameter that is trained",
            code="W5-205",
            fix="compute it from model(…) without torch.no_grad() or .detach()",
        )
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise JobError(what, code="W5-205", why=describe(error), fix=_hint(error)) from error
    return value


def _hint(error: Exception) -> str:
    text = str(error)
    if "Long" in text or "expected scalar type" in text or "target" in text:
        return (
            "check the type of the labels: class numbers must be integers (y.long()),"
            " targets floats (y.float())"
        )
    if "mat1 and mat2" in text or "size" in text or "shape" in text:
        return "check that the shape of the batch fits the model"
    return "call loss(model(), batch) on one batch by hand to see the whole error"


def _check_gradients(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise JobError(
                f"the gradient of {name} is sparse",
                code="W5-225",
                fix="build the embedding with sparse=False (gradients travel as one dense vector)",
            )
        parameter.grad = None


def _changed_buffers(module: nn.Module, before: dict[str, _Kept]) -> set[str]:
    """Names of the persistent buffers that the first batch wrote to; all are put back as they were."""
    persistent = set(module.state_dict(keep_vars=True))
    written = set()
    for name, buffer in list(module.named_buffers()):
        kept = before.get(name)
        if kept is None or not kept.is_alike(buffer):
            if name not in persistent:
                continue  # a cache that grows is nobody's state
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
        # Back to the tensor it was, for one that was assigned may be a view of something else.
        owner, _, local = name.rpartition(".")
        setattr(module.get_submodule(owner), local, kept.tensor)
        if not kept.is_same(kept.tensor):
            with torch.no_grad():
                kept.tensor.copy_(kept.values)
    return written


def _refuse_without_differences(name: str, kept: _Kept, now: Tensor) -> None:
    """Nodes tell how they changed a buffer; from infinity to a number there is no difference to tell."""
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


def _refuse_unsavable(layout: Layout) -> None:
    """A dtype that model.safetensors cannot hold would be found out only when training is over."""
    for entry in layout.entries:
        try:
            save({"": torch.empty(0, dtype=layouts.DTYPES[entry.dtype])})
        except KeyError:
            raise JobError(
                f"{entry.name} is {entry.dtype}, which a safetensors file cannot hold",
                code="W5-230",
                fix="use a smaller dtype (complex64), or two real tensors",
            ) from None


# --- optimizer, schedule, evaluation --------------------------------------------------------------


def _build_optimizer(job: Job, module: nn.Module) -> Optimizer:
    optimizer = _call("optimizer()", job.optimizer, ModelParameters(module))
    if not isinstance(optimizer, Optimizer):
        raise JobError(
            f"optimizer() returned a {type(optimizer).__name__}",
            code="W5-202",
            fix="return a torch.optim.Optimizer",
        )
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        raise JobError(
            f"{type(optimizer).__name__} cannot be used here",
            code="W5-227",
            why="it needs to evaluate the loss again, or sparse gradients, inside its step",
            fix="use an optimizer whose step() takes the gradients as they are (SGD, Adam, AdamW, …)",
        )
    own = {id(parameter) for parameter in module.parameters()}
    for group in optimizer.param_groups:
        if any(id(parameter) not in own for parameter in group["params"]):
            raise JobError(
                "the optimizer holds parameters that are not the model's",
                code="W5-227",
                fix="build it from the parameters it is given:  optimizer=lambda params: SGD(params, lr=…)",
            )
    return optimizer


def _build_scheduler(job: Job, optimizer: Optimizer) -> Any:
    if job.scheduler is None:
        return None
    scheduler = _call("scheduler()", job.scheduler, optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise JobError(
            "ReduceLROnPlateau cannot be used here: it wants a metric at each step",
            code="W5-228",
            fix="use a schedule over steps, for example CosineAnnealingLR or OneCycleLR",
        )
    if not isinstance(scheduler, LRScheduler):
        raise JobError(
            f"scheduler() returned a {type(scheduler).__name__}",
            code="W5-202",
            fix="return a torch.optim.lr_scheduler.LRScheduler",
        )
    return scheduler


def _build_evaluate(
    job: Job, another: Callable[[], nn.Module]
) -> Callable[[nn.Module], dict[str, float]] | None:
    """The evaluation, made to return a dict of numbers whatever the user's returns."""
    function = job.evaluate
    if function is None:
        return None

    def evaluate(trained: nn.Module) -> dict[str, float]:
        trained.eval()
        with torch.no_grad():
            found = function(trained)
        if not isinstance(found, dict):
            found = {"score": found}
        return {str(key): float(value) for key, value in found.items()}

    # Tried at once on a copy: an evaluation that fails after an hour of training helps nobody.
    state = torch.get_rng_state()
    try:
        evaluate(another())
    except Exception as error:
        raise JobError(
            f"evaluate() failed on the untrained model: {describe(error)}",
            code="W5-229",
            fix="evaluate(model) must return a number or a dict of numbers",
        ) from error
    finally:
        torch.set_rng_state(state)
    return evaluate


# --- the node's side ------------------------------------------------------------------------------


@dataclass(slots=True)
class NodeParts:
    """A node's copy of the model, and of the data if it reads its own."""

    trainer: Trainer
    source: MapSource | None
    layout_digest: str
    welcome: Welcome

    def fits(self, welcome: Welcome) -> bool:
        """Whether these parts also serve another connection."""
        return self.welcome.layout == welcome.layout and self.welcome.rules == welcome.rules


def prepare_node(job: Job, welcome: Welcome, device: torch.device) -> NodeParts:
    """Build the node's model and data and check them against the coordinator's."""
    rules = welcome.rules
    use_threads(rules.threads)
    module = build_model(job, rules.seed)
    moving = {entry.name for entry in welcome.layout.entries if entry.role == MOVING}
    layout = layouts.describe(module, moving)
    digest = layout.digest()
    if digest != welcome.layout.digest():
        found = layouts.Blueprint(welcome.layout).differences(layout)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise JoinError(
            f"your model differs from the run's: {'; '.join(found[:3])}{more}",
            code="W5-201",
            fix="use the coordinator's job file",
        )
    source = _own_source(job, rules) if rules.data == "local" else None
    flat = FlatModel(module, layout, device)
    return NodeParts(Trainer(job, flat, rules, device), source, digest, welcome)


def _own_source(job: Job, rules: Rules) -> MapSource:
    source = build_source(job, rules.seed, 1, shuffle=False)
    if not isinstance(source, MapSource) or source.samples != rules.data_samples:
        raise JoinError(
            f"your data set has {source.samples} samples, the run's has {rules.data_samples}",
            code="W5-209",
            fix="copy the coordinator's data here, or let it send batches with --data stream",
        )
    if source.fingerprint() != rules.data_digest:
        raise JoinError(
            "your data set has as many samples as the run's, but other ones",
            code="W5-209",
            fix="copy the coordinator's data here, or let it send batches with --data stream",
        )
    return source


def use_threads(count: int) -> None:
    """Let torch use this many threads for what the calling thread computes.

    Sums are split by the number of threads, so bits depend on it; and the setting holds for one thread only.
    """
    torch.set_num_threads(max(1, count))


def choose_device(wanted: str) -> torch.device:
    """The device to compute on: the one asked for, or the best there is. Starts no driver."""
    if wanted == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"--device {wanted}: {describe(error)}", code="W5-301", fix=_DEVICE_FIX) from error
    backend = getattr(torch, device.type, None)
    if device.type != "cpu" and not (hasattr(backend, "is_available") and backend.is_available()):
        raise UsageError(
            f"--device {wanted} was asked for, but torch {torch.__version__} finds none here",
            code="W5-301",
            fix=_DEVICE_FIX,
        )
    return device


_DEVICE_FIX = "--device auto takes the best there is, --device cpu always works"
