"""The state of a learner as files: weights, optimizer, scheduler and random state. No pickle, no torch.load.

    model.safetensors       the state dict, for any program that reads safetensors
    training.safetensors    every other tensor: of the optimizer, the scheduler and the random generators
    learner.json            what is not a tensor, and where in it each tensor belongs

Numbers, strings, lists, tuples, dicts and tensors are restored as they were (subclasses as their base class);
a value of any other type is refused, with its name. Knows no disk: a file is an iterable of pieces.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from w5xde.errors import JobError, StorageError
from w5xde.learn.job.job import describe
from w5xde.learn.model.digest import tensors_sha256
from w5xde.learn.model.layout import differences
from w5xde.learn.model.tensor_file import safetensors_pieces
from w5xde.learn.step.learner import Learner
from w5xde.messages import Layout

MODEL, TRAINING, LEARNER = "model.safetensors", "training.safetensors", "learner.json"
_INT_MAX = 2**63 - 1
# The size of a Mersenne twister's state.
_GENERATOR_WORDS = 624

Tensors = dict[str, torch.Tensor]


# --- values ---------------------------------------------------------------------------------------


def pack(value: Any, where: str, tensors: Tensors) -> Any:
    """The value as JSON; its tensors are added to `tensors`, named after their place in it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        # Two places may have the same name, as those of the keys 1 and "1".
        name = where if where not in tensors else f"{where}~{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, int):
        return int(value) if abs(value) <= _INT_MAX else {"int": str(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, list):
        return [pack(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [pack(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [[_key(key, where), pack(item, f"{where}.{key}", tensors)] for key, item in value.items()]
        }
    raise JobError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep",
        code="W5-232",
        fix="keep numbers, strings, lists, dicts and tensors in state_dict(), or use --checkpoint-every off",
    )


def _key(key: Any, where: str) -> Any:
    if key is None or isinstance(key, (bool, int, str, float)):
        return pack(key, where, {})
    raise JobError(
        f"{where} has a key {key!r}, which a checkpoint cannot keep",
        code="W5-232",
        fix="use strings or numbers as keys in state_dict(), or --checkpoint-every off",
    )


def unpack(packed: Any, tensors: Tensors) -> Any:
    """The value that `pack` was given."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "int":
            return int(content)
        case "float":
            return float(content)
        case "tuple":
            return tuple(unpack(item, tensors) for item in content)
        case "dict":
            return {unpack(key, tensors): unpack(item, tensors) for key, item in content}
        case "counter":
            return Counter({unpack(key, tensors): unpack(item, tensors) for key, item in content})
    raise ValueError(f"no value in a checkpoint is a {kind!r}")


# --- random state ---------------------------------------------------------------------------------


def _random_state() -> dict[str, Any]:
    """The state of the global random generators: an optimizer may draw from them."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": {
            "key": torch.tensor(numpy["state"]["key"].astype(np.int64)),
            "pos": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    numpy = state["numpy"]
    # numpy does not check this index, and would read beyond the end of its array.
    if not 0 <= numpy["pos"] <= _GENERATOR_WORDS:
        raise ValueError(f"numpy's generator is at word {numpy['pos']} of {_GENERATOR_WORDS}")
    key = numpy["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))  # noqa: NPY002


# --- the learner ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnerState:
    """A learner's state between two steps."""

    version: int
    model: Tensors
    training: Tensors
    facts: dict[str, Any]
    # Whether the tensors are the learner's own, which its next step changes, and not copies.
    is_live: bool

    def weights_sha256(self) -> str:
        return tensors_sha256(self.model.values())

    def files(self) -> dict[str, Iterable[bytes | memoryview]]:
        """The content of each file, by name, in pieces."""
        return {
            MODEL: safetensors_pieces(self.model),
            TRAINING: safetensors_pieces(self.training),
            LEARNER: [msgspec.json.encode(self.facts)],
        }


def capture(learner: Learner) -> LearnerState:
    """Copy the learner's state, or only refer to it if it is large (`is_live`).

    Raises JobError if the optimizer's state has a value that cannot be saved.
    """
    model = _model_tensors(learner.flat.module)
    training: Tensors = {}
    facts = _identity(learner) | {
        "version": learner.version,
        "optimizer_state": pack(learner.optimizer.state_dict(), "optimizer", training),
        "scheduler_state": pack(
            learner.scheduler.state_dict() if learner.scheduler is not None else None, "scheduler", training
        ),
        "random": pack(_random_state(), "random", training),
    }
    if learner.measured_step:
        facts["measured_step"] = learner.measured_step
    if learner.rounds is not None:
        facts["rounds"] = pack(learner.rounds.state(), "rounds", training)
    is_live = learner.route.is_saved_in_place
    if not is_live:
        model, training = _copies(model), _copies(training)
    return LearnerState(learner.version, model, training, facts, is_live)


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def model_pieces(module: torch.nn.Module) -> Iterator[bytes | memoryview]:
    """The whole state dict in the format safetensors; the module must not change before all is used."""
    return safetensors_pieces(_model_tensors(module))


def _model_tensors(module: torch.nn.Module) -> Tensors:
    return {name: each for name, each in module.state_dict().items() if isinstance(each, torch.Tensor)}


def load_model(module: torch.nn.Module, data: bytes) -> None:
    """Load what `model_pieces` wrote; raises StorageError if that is not of such a module."""
    try:
        saved, own = load(data), _model_tensors(module)
        differing = sorted(saved.keys() ^ own.keys())
        if differing:
            raise ValueError(f"{differing[0]} is in one of them alone")
        with torch.no_grad():
            module.load_state_dict(saved, strict=False)
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"the saved model does not fit the job: {describe(error)}",
            code="W5-405",
            fix="use the job file the run was started with, or start a new run",
        ) from error


def refuse_unkeepable(learner: Learner) -> None:
    """Raise JobError before training if a checkpoint could not save the optimizer or the scheduler."""
    pack(learner.optimizer.state_dict(), "optimizer", {})
    if learner.scheduler is not None:
        pack(learner.scheduler.state_dict(), "scheduler", {})


def _identity(learner: Learner) -> dict[str, Any]:
    """What must be the same in a job and in the checkpoint from which it resumes."""
    optimizer, scheduler = learner.optimizer, learner.scheduler
    return {
        "layout": msgspec.to_builtins(learner.flat.blueprint.layout),
        "optimizer": type(optimizer).__name__,
        "optimizer_defaults": pack(optimizer.defaults, "the optimizer's default", {}),
        "groups": [len(group["params"]) for group in optimizer.param_groups],
        "scheduler": type(scheduler).__name__ if scheduler is not None else None,
    }


class _LearnerJson(msgspec.Struct):
    """The content of learner.json."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    layout: Layout
    optimizer: str
    optimizer_defaults: Any
    groups: list[int]
    scheduler: str | None
    optimizer_state: Any
    scheduler_state: Any
    random: Any
    # None: the run is not in rounds mode.
    rounds: Any = None
    # Of a schedule that a metric steps: the newest step that it was stepped for.
    measured_step: Annotated[int, msgspec.Meta(ge=0)] = 0


# What the libraries raise when they are given bytes that are not a checkpoint of ours.
_DECODING_ERRORS = (
    SafetensorError,
    msgspec.DecodeError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
    RecursionError,
)


def restore(learner: Learner, files: Mapping[str, bytes]) -> None:
    """Restore the learner from a checkpoint's files; raises StorageError if they do not fit the job."""
    with _refusing_foreign_files():
        facts = _restore_weights(learner, files)
        _restore_training(learner, facts, load(files[TRAINING]))


def restore_weights(learner: Learner, files: Mapping[str, bytes]) -> None:
    """Restore only the model and its version, for a learner that broke and will not train any more."""
    with _refusing_foreign_files():
        _restore_weights(learner, files)


@contextlib.contextmanager
def _refusing_foreign_files() -> Iterator[None]:
    try:
        yield
    except _DECODING_ERRORS as error:
        raise StorageError(
            f"the checkpoint cannot be used: {describe(error)}",
            code="W5-407",
            fix="it was not written by w5xde for this job; remove it, and the one before it is used",
        ) from error


def _restore_weights(learner: Learner, files: Mapping[str, bytes]) -> _LearnerJson:
    facts = msgspec.json.decode(files[LEARNER], type=_LearnerJson)
    _require_fit(learner, facts)
    model = load(files[MODEL])
    # A step that broke may have given a parameter other memory.
    learner.flat.reclaim()
    with torch.no_grad():
        for entry, tensor in zip(learner.flat.blueprint.layout.entries, learner.flat.tensors, strict=True):
            kept = model[entry.name]
            if (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(f"{entry.name} is {tuple(kept.shape)} {kept.dtype}")
            tensor.copy_(kept)
    learner.version = facts.version
    return facts


def _restore_training(learner: Learner, facts: _LearnerJson, training: Tensors) -> None:
    state = unpack(facts.optimizer_state, training)
    learner.optimizer.load_state_dict(state)
    _keep_types(learner, state)
    if learner.scheduler is not None:
        learner.scheduler.load_state_dict(
            _plain_state(learner.scheduler, unpack(facts.scheduler_state, training))
        )
    learner.measured_step = facts.measured_step
    if learner.rounds is not None:
        learner.rounds.load_state(unpack(facts.rounds, training), learner.version)
    _set_random_state(unpack(facts.random, training))


def _plain_state(scheduler: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Refuse keys that are names of methods: torch makes every key of a scheduler's state an attribute."""
    methods = {
        name for kind in type(scheduler).__mro__ for name, held in vars(kind).items() if callable(held)
    }
    taken = sorted(state.keys() & (methods | {"optimizer"}))
    if taken:
        raise ValueError(f"a scheduler's state cannot hold {taken[0]!r}")
    return state


def _keep_types(learner: Learner, state: dict[str, Any]) -> None:
    """Undo a cast: torch casts an optimizer's state to its parameter's type when it loads it."""
    parameters = [p for group in learner.optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            held = learner.optimizer.state[parameter].get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(held, torch.Tensor)
                and held.dtype != value.dtype
            ):
                learner.optimizer.state[parameter][key] = value.to(held.device)


def _require_fit(learner: Learner, facts: _LearnerJson) -> None:
    now = _identity(learner)
    found = [f"parameter {each}" for each in differences(facts.layout, learner.flat.blueprint.layout)]
    if facts.optimizer != now["optimizer"]:
        found.append(f"the optimizer is {now['optimizer']}, expected {facts.optimizer}")
    else:
        # Only compared and shown; of tensors only the names are compared.
        before, after = dict(facts.optimizer_defaults["dict"]), dict(now["optimizer_defaults"]["dict"])
        found += [
            f"the optimizer's {key} is {after.get(key)}, expected {before.get(key)}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]
    if facts.scheduler != now["scheduler"]:
        found.append(f"the scheduler is {now['scheduler'] or 'none'}, expected {facts.scheduler or 'none'}")
    if facts.groups != now["groups"]:
        found.append(f"the optimizer's groups have {now['groups']} parameters, expected {facts.groups}")
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        is_rate = any(each.startswith("the optimizer's lr ") for each in found)
        raise StorageError(
            f"the job does not fit the run: {'; '.join(found[:3])}{more}",
            code="W5-405",
            fix="resume with the job file the run was started with, or start a new run"
            + ("; to change the learning rate:  --override lr=…" if is_rate else ""),
        )
