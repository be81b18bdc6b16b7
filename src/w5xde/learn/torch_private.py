"""Every private part of torch that `learn` uses. No other module of `learn` may use one.

Torch may change a private name without notice. `tests/learn/test_torch_private.py` checks that each name used
here exists and behaves as this module expects, and fails with the name that changed. Knows nothing of
batches, models or runs: callers pass tensors, functions and optimizers.
"""

from __future__ import annotations

import inspect
import sys
from _thread import get_ident
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# --- tensors and modules --------------------------------------------------------------------------


def write_count(tensor: Tensor) -> int:
    """How often torch has written into this tensor; writes through `.data` are not counted."""
    return tensor._version


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of this module, without those of its children."""
    return module._parameters


def has_hooks(tensor: Tensor) -> bool:
    """Whether code registered hooks that autograd calls for the gradient of this tensor."""
    return bool(tensor._backward_hooks)


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of this module, without those of its children: assigning to an item replaces a buffer."""
    return module._buffers


# --- backward -------------------------------------------------------------------------------------

# Batches of one run have a few different weights, by the number of samples in a batch and in a step.
WEIGHTS_MAX = 256


@lru_cache(WEIGHTS_MAX)
def scale_of(weight: float) -> Tensor:
    """The tensor from which `backward` starts for this weight. Callers must not write into it."""
    return torch.tensor(weight, dtype=torch.float32)


def starts_at_scale(loss: Tensor) -> bool:
    """Whether `backward` starts at `scale_of(weight)`, without multiplying the loss first."""
    return type(loss) is Tensor and not loss.dim() and loss.dtype == torch.float32 and loss.is_cpu


def backward(loss: Tensor, weight: float) -> None:
    """Add the gradients of `loss * weight` to the parameters.

    `Tensor.backward` takes a fifth of a small model's time before it reaches its engine, and given a gradient
    it first imports a package for symbolic algebra. So the engine gets a plain loss directly.
    """
    if not starts_at_scale(loss):
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        return
    Variable._execution_engine.run_backward(
        (loss,), (scale_of(weight),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# --- kernels --------------------------------------------------------------------------------------

_aten = torch.ops.aten

# Kernels whose result differs from call to call, or is visible to Python.
_UNRECORDABLE_TAGS = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    # Such a kernel changes the shape of a tensor that other code holds too.
    torch.Tag.inplace_view,
}
# Methods that give a tensor's values to Python or to another library without calling a kernel.
_VALUE_READERS = ("numpy", "tolist", "data_ptr", "untyped_storage", "__dlpack__")

# Kernels that can write into given tensors: the function to call, and its names for these tensors.
OUT_VARIANTS: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    _aten.addmm.default: (torch.addmm, ("out",)),
    _aten.mm.default: (torch.mm, ("out",)),
    _aten.bmm.default: (torch.bmm, ("out",)),
    _aten.tanh.default: (torch.tanh, ("out",)),
    _aten.sigmoid.default: (torch.sigmoid, ("out",)),
    _aten.sum.dim_IntList: (torch.sum, ("out",)),
    _aten._log_softmax.default: (torch._log_softmax, ("out",)),
    _aten._log_softmax_backward_data.default: (torch._log_softmax_backward_data, ("out",)),
    # Torch computes relu as this too.
    _aten.relu.default: (partial(torch.clamp_min, min=0), ("out",)),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input._op, ("grad_input",)),
    _aten.nll_loss_forward.default: (_aten.nll_loss_forward.output._op, ("output", "total_weight")),
    _aten.nll_loss_backward.default: (_aten.nll_loss_backward.grad_input._op, ("grad_input",)),
}
# Kernels that work along one dimension, which follows their tensors among the arguments.
SOFTMAX_KERNELS = (
    _aten._log_softmax.default,
    _aten._softmax.default,
    _aten._log_softmax_backward_data.default,
    _aten._softmax_backward_data.default,
)


class NotRecordable(Exception):
    """A batch does something that a recording cannot repeat."""


class KernelCall(NamedTuple):
    """One call of a kernel: its arguments and its results."""

    kernel: Any
    args: list[Any]
    options: dict[str, Any]
    results: list[Any]
    # Whether the kernel returns its results as a tuple or list.
    returns_several: bool

    @property
    def is_view(self) -> bool:
        return bool(self.kernel.is_view)

    @property
    def is_pointwise(self) -> bool:
        return torch.Tag.pointwise in self.kernel.tags

    @property
    def writes(self) -> bool:
        """Whether the kernel writes into one of its arguments."""
        return bool(self.kernel._schema.is_mutable)

    @property
    def written(self) -> list[Any]:
        """The arguments that the kernel writes into."""
        arguments = self.kernel._schema.arguments
        given = dict(zip((each.name for each in arguments), self.args, strict=False)) | self.options
        return [
            tensor
            for each in arguments
            if each.alias_info is not None and each.alias_info.is_write and each.name in given
            for tensor in listed(given[each.name])
        ]

    @property
    def function(self) -> Callable[..., Any]:
        """Calls the kernel, without Python's choice among its overloads."""
        function: Callable[..., Any] = self.kernel._op
        return function


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A value with `function` applied to everything in it that is not a list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return type(value)([map_leaves(function, each) for each in value])
    if isinstance(value, dict):
        return {key: map_leaves(function, each) for key, each in value.items()}
    return function(value)


def watch(compute: Callable[[], Tensor]) -> tuple[Tensor, list[KernelCall]]:
    """Call `compute`, and return its result and every kernel that it called, forward and backward.

    Raises `NotRecordable` if the kernels are not all that determines the result.
    """
    if has_compiled():
        # Compiled code calls other things than kernels, and the compiler must not meet the watcher.
        raise NotRecordable("a part of it may be compiled")
    watcher = _Watcher()

    def refuse(name: str) -> NoReturn:
        watcher.refuse(f"{name} gives a value to Python")

    try:
        with _without_value_readers(refuse), _TensorSplitWatcher(refuse), watcher:
            loss = compute()
    except Exception as error:
        if watcher.refusal:
            # Code between here and `refuse` made another exception of it.
            raise NotRecordable(watcher.refusal) from error
        raise
    if watcher.refusal:
        # The user's code caught the exception that `refuse` raised.
        raise NotRecordable(watcher.refusal)
    return loss, watcher.calls


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch calls it instead of each kernel, below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and to skip the compiler torch would import it, which takes seconds.
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[KernelCall] = []
        self.refusal = ""

    def refuse(self, reason: str) -> NoReturn:
        self.refusal = reason
        raise NotRecordable(reason)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _UNRECORDABLE_TAGS.isdisjoint(func.tags):
            self.refuse(f"the result of {func} is random or visible to Python")
        result = func(*args, **kwargs)
        several = isinstance(result, (tuple, list))
        self.calls.append(KernelCall(func, list(args), kwargs, listed(result), several))
        return result


class _TensorSplitWatcher(TorchFunctionMode):
    """Refuses `tensor_split`, which reads a tensor and calls no kernel to do so."""

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "tensor_split":
            self._refuse("tensor_split")
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_value_readers(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """Let `_VALUE_READERS` call `refuse` in this thread; other threads use them as usual."""
    thread = get_ident()
    before = {name: vars(Tensor)[name] for name in _VALUE_READERS if name in vars(Tensor)}

    def replacement(name: str) -> Callable[..., Any]:
        usual = getattr(Tensor, name)
        return lambda *args, **kwargs: usual(*args, **kwargs) if get_ident() != thread else refuse(name)

    for name in _VALUE_READERS:
        setattr(Tensor, name, replacement(name))
    try:
        yield
    finally:
        for name in _VALUE_READERS:
            if name in before:
                setattr(Tensor, name, before[name])
            else:
                delattr(Tensor, name)  # Tensor inherits it


# --- optimizers -----------------------------------------------------------------------------------

# Torch keeps beside a function the variant that its compiler must not compile, and uses one that it finds.
_UNCOMPILED = "__dynamo_disable"


def compiler_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def has_compiled() -> bool:
    """Whether torch's compiler has compiled any function in this process (`torch.compile`)."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is not None and compiler.counters["frames"]["total"] > 0


def avoid_compiler_import() -> None:
    """Keep optimizers from importing torch's compiler, which takes two seconds and 70 MB.

    They import it only to exclude these functions from compilation. If a job compiles its model, the compiler
    is loaded already, and this changes nothing.
    """
    if compiler_is_loaded():
        return
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        plain = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if plain is not None and not hasattr(plain, _UNCOMPILED):
            setattr(plain, _UNCOMPILED, plain)


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step()` does more than its class defines: it has hooks, or was replaced."""
    replaced = vars(optimizer).get("step")
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        # A schedule replaces it too, but only counts the steps.
        or (replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"))
    )


def step_uncompiled(optimizer: Optimizer) -> None:
    """`optimizer.step()` of one of torch's optimizers without hooks, without importing the compiler."""
    with torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable", False))):
        inspect.unwrap(type(optimizer).step)(optimizer)
    # A schedule reads it, to warn if it steps before its optimizer.
    optimizer._opt_called = True  # type: ignore[attr-defined]


def twin_of(
    optimizer: Optimizer, groups: list[list[Tensor]], state: dict[Tensor, dict[str, Any]]
) -> Optimizer:
    """An optimizer of the same class and options that steps other tensors, with this state."""
    twin = object.__new__(type(optimizer))
    options = optimizer.param_groups
    twin.__setstate__(
        {
            "defaults": optimizer.defaults,
            "state": defaultdict(dict, state),
            "param_groups": [
                {**group, "params": tensors} for group, tensors in zip(options, groups, strict=True)
            ],
        }
    )
    return twin


def fused_adam(*tensors: list[Tensor], is_decoupled: bool, group: dict[str, Any]) -> None:
    """One step of fused Adam, or of AdamW if `is_decoupled`, with the options of an optimizer's group.

    `tensors` are parameters, gradients, their averages, those of their squares, and step counters, which the
    caller advances.
    """
    kernel: Any = torch._fused_adamw_ if is_decoupled else torch._fused_adam_
    options = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize")}
    beta1, beta2 = group["betas"]
    *rows, steps = tensors
    kernel(
        *rows, [], steps, **options, beta1=beta1, beta2=beta2, amsgrad=False, grad_scale=None, found_inf=None
    )
