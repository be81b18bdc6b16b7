"""Torch's private parts: each that we use exists and does what we expect; a failure names the changed one.

No private part is looked up before a test runs, so that one that is gone fails its own test, by name.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import w5xde

LEARN = Path(w5xde.__file__).parent / "learn"
HOME = LEARN / "torch_private.py"


# --- what each private part must do ---------------------------------------------------------------


def writes_are_counted() -> None:
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    tensor.data.add_(1)
    assert tensor._version == before + 1


def an_assigned_item_is_the_buffer() -> None:
    module = nn.BatchNorm1d(2)
    module._buffers["running_mean"] = changed = torch.ones(2)
    assert module.running_mean is changed
    assert "weight" not in module._buffers


def parameters_are_kept_by_their_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert module._parameters == {}
    assert module[0]._parameters["weight"] is module[0].weight


def hooks_of_a_gradient_are_listed() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert not parameter._backward_hooks
    hook = parameter.register_hook(lambda gradient: gradient)
    assert parameter._backward_hooks
    hook.remove()
    assert not parameter._backward_hooks


def the_engine_accumulates_scaled_gradients() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = (weight * weight).sum()
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.tensor(0.5),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 2.0]


def watched(compute: Callable[[], Any]) -> list[tuple[Any, tuple[Any, ...], Any]]:
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
    calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    class Watcher(mode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            calls.append((func, args, result))
            return result

    with Watcher():
        compute()
    return calls


def a_dispatch_mode_sees_kernels_below_autograd() -> None:
    weight, rows = torch.ones(2, 2, requires_grad=True), torch.ones(3, 2)
    kernels = [str(func) for func, _, _ in watched(lambda: rows.mm(weight).sum().backward())]
    assert "aten.mm.default" in kernels
    assert kernels.count("aten.mm.default") == 2, "forward and backward each call mm once"


def a_dispatch_mode_does_not_load_the_compiler() -> None:
    code = (
        "import sys; from tests.learn import test_torch_private as t\n"
        "t.a_dispatch_mode_sees_kernels_below_autograd(); sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def a_schema_says_what_is_written() -> None:
    ((func, _, _),) = watched(lambda: torch.zeros(2).add_(1))[-1:]
    assert func._schema.is_mutable
    assert [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write] == [
        "self"
    ]
    assert not torch.ops.aten.add.Tensor._schema.is_mutable


def an_entry_is_the_kernel() -> None:
    left, right = torch.ones(2, 3), torch.ones(3, 2)
    assert torch.equal(torch.ops.aten.mm.default._op(left, right), left.mm(right))


ROWS = torch.linspace(-2, 2, 12).view(3, 4)
CLASSES = torch.tensor([0, 3, 1])


def log_softmax_writes_to_its_place() -> None:
    out = torch.empty(3, 4)
    torch._log_softmax(ROWS, 1, False, out=out)
    assert torch.equal(out, torch.ops.aten._log_softmax.default(ROWS, 1, False))
    assert torch.equal(out, ROWS.log_softmax(1))


def log_softmax_backward_writes_to_its_place() -> None:
    out, given = torch.empty(3, 4), ROWS.log_softmax(1)
    torch._log_softmax_backward_data(ROWS, given, 1, torch.float32, out=out)
    assert torch.equal(out, torch.ops.aten._log_softmax_backward_data.default(ROWS, given, 1, torch.float32))


def softmax_takes_a_dimension_after_its_tensors() -> None:
    given = torch.ops.aten._softmax.default(ROWS, 1, False)
    assert torch.equal(given, ROWS.softmax(1))
    back = torch.ops.aten._softmax_backward_data.default(ROWS, given, 1, torch.float32)
    assert back.shape == ROWS.shape


def variants_write_to_their_places() -> None:
    """Whatever has a variant that writes to a place gives the bits of the kernel itself."""
    private = importlib.import_module("w5xde.learn.torch_private")
    aten, logs = torch.ops.aten, ROWS.log_softmax(1)
    loss, total = aten.nll_loss_forward.default(logs, CLASSES, None, 1, -100)
    one = torch.tensor(1.0)
    args: dict[Any, tuple[Any, ...]] = {
        aten.addmm.default: (torch.ones(3), ROWS, ROWS.t()),
        aten.mm.default: (ROWS, ROWS.t()),
        aten.bmm.default: (ROWS[None], ROWS.t()[None]),
        aten.tanh.default: (ROWS,),
        aten.sigmoid.default: (ROWS,),
        aten.relu.default: (ROWS,),
        aten.threshold_backward.default: (ROWS, ROWS.relu(), 0),
        aten.sum.dim_IntList: (ROWS, [0], True),
        aten._log_softmax.default: (ROWS, 1, False),
        aten._log_softmax_backward_data.default: (ROWS, logs, 1, torch.float32),
        aten.nll_loss_forward.default: (logs, CLASSES, None, 1, -100),
        aten.nll_loss_backward.default: (one, logs, CLASSES, None, 1, -100, total),
    }
    assert loss.shape == ()
    assert set(args) == set(private.OUT_VARIANTS)
    for kernel, (function, names) in private.OUT_VARIANTS.items():
        expected = private.listed(kernel(*args[kernel]))
        places = [torch.full_like(each, 7.0) for each in expected]
        function(*args[kernel], **dict(zip(names, places, strict=True)))
        assert all(map(torch.equal, places, expected)), kernel


def stepped(make: Callable[[list[Tensor]], Optimizer]) -> Tensor:
    parameter = nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = make([parameter])
    parameter.grad = torch.linspace(1, 2, 5)
    optimizer.step()
    return parameter.detach()


def fused(kernel: Any, decay: float) -> Tensor:
    weights, step = torch.linspace(-1, 1, 5), torch.tensor(1.0)
    means, squares = torch.zeros(5), torch.zeros(5)
    kernel(
        [weights], [torch.linspace(1, 2, 5)], [means], [squares], [], [step],
        amsgrad=False, lr=0.1, beta1=0.9, beta2=0.999, weight_decay=decay, eps=1e-8, maximize=False,
        grad_scale=None, found_inf=None,
    )  # fmt: skip
    assert step.item() == 1.0, "the caller counts"
    return weights


def fused_adam_is_a_step() -> None:
    expected = stepped(lambda p: Adam(p, lr=0.1, weight_decay=0.2, fused=True))
    assert torch.equal(fused(torch._fused_adam_, 0.2), expected)


def fused_adamw_is_a_step() -> None:
    expected = stepped(lambda p: AdamW(p, lr=0.1, weight_decay=0.2, fused=True))
    assert torch.equal(fused(torch._fused_adamw_, 0.2), expected)


def some_optimizer() -> Optimizer:
    return SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


def hooks_are_listed() -> None:
    optimizer = some_optimizer()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert optimizer._optimizer_step_pre_hooks
    assert optimizer._optimizer_step_post_hooks


def global_hooks_are_listed() -> None:
    module = importlib.import_module("torch.optim.optimizer")
    for register, listed in (
        (module.register_optimizer_step_pre_hook, module._global_optimizer_pre_hooks),
        (module.register_optimizer_step_post_hook, module._global_optimizer_post_hooks),
    ):
        handle = register(lambda *_: None)
        assert listed
        handle.remove()
        assert not listed


def a_schedule_marks_the_step_that_it_wraps() -> None:
    optimizer = some_optimizer()
    StepLR(optimizer, 1)
    assert hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched")


def a_schedule_asks_whether_the_optimizer_stepped() -> None:
    optimizer = some_optimizer()
    schedule = StepLR(optimizer, 1)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    schedule.step()  # or it warns, which is an error here


def an_optimizer_finds_what_lies_beside_its_functions() -> None:
    code = (
        "import sys, torch; from w5xde.learn.torch_private import avoid_compiler_import\n"
        "avoid_compiler_import(); optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)\n"
        "optimizer.zero_grad(); optimizer.load_state_dict(optimizer.state_dict())\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def the_compiler_counts_what_it_compiles() -> None:
    # In another process: the compiler stays in the one that loads it.
    script = (
        "import torch; from w5xde.learn.torch_private import has_compiled\n"
        "assert not has_compiled()\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "assert not has_compiled()\n"
        "double(torch.ones(2))\n"
        "assert has_compiled()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


BEHAVIOUR: dict[str, list[Callable[[], None]]] = {
    "_version": [writes_are_counted],
    "_buffers": [an_assigned_item_is_the_buffer],
    "_parameters": [parameters_are_kept_by_their_module],
    "_backward_hooks": [hooks_of_a_gradient_are_listed],
    "_execution_engine": [the_engine_accumulates_scaled_gradients],
    "_python_dispatch": [a_dispatch_mode_sees_kernels_below_autograd],
    "_should_skip_dynamo": [a_dispatch_mode_does_not_load_the_compiler],
    "_schema": [a_schema_says_what_is_written],
    "_op": [an_entry_is_the_kernel, variants_write_to_their_places],
    "_log_softmax": [log_softmax_writes_to_its_place],
    "_log_softmax_backward_data": [log_softmax_backward_writes_to_its_place],
    "_softmax": [softmax_takes_a_dimension_after_its_tensors],
    "_softmax_backward_data": [softmax_takes_a_dimension_after_its_tensors],
    "_fused_adam_": [fused_adam_is_a_step],
    "_fused_adamw_": [fused_adamw_is_a_step],
    "_optimizer_step_pre_hooks": [hooks_are_listed],
    "_optimizer_step_post_hooks": [hooks_are_listed],
    "_global_optimizer_pre_hooks": [global_hooks_are_listed],
    "_global_optimizer_post_hooks": [global_hooks_are_listed],
    "_wrapped_by_lr_sched": [a_schedule_marks_the_step_that_it_wraps],
    "_opt_called": [a_schedule_asks_whether_the_optimizer_stepped],
    "__dynamo_disable": [an_optimizer_finds_what_lies_beside_its_functions],
    "torch._dynamo": [an_optimizer_finds_what_lies_beside_its_functions],
    "torch._dynamo.utils": [the_compiler_counts_what_it_compiles],
}


@pytest.mark.parametrize(
    ("name", "check"), [(name, check) for name, checks in BEHAVIOUR.items() for check in checks]
)
def test_a_private_part_of_torch_behaves_as_we_expect(name: str, check: Callable[[], None]) -> None:
    try:
        check()
    except (Exception, SystemExit) as error:
        pytest.fail(f"torch {torch.__version__} changed its private part {name}: {error!r}")


def test_kernels_say_whether_they_are_random_views_or_element_by_element() -> None:
    aten = torch.ops.aten
    assert torch.Tag.nondeterministic_seeded in aten.bernoulli.default.tags
    assert torch.Tag.data_dependent_output in aten._local_scalar_dense.default.tags
    assert torch.Tag.dynamic_output_shape in aten.nonzero.default.tags
    assert torch.Tag.inplace_view in aten.squeeze_.dim.tags
    assert torch.Tag.pointwise in aten.mul.Tensor.tags
    assert aten.view.default.is_view
    assert not aten.mm.default.is_view


# --- and nothing else is used ---------------------------------------------------------------------


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of others that a module uses: attributes, imports, and names within strings."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if name.startswith("_") and not name.endswith("__"):
                if name not in {"_replace"} | own:
                    yield name
            case ast.ImportFrom(module=module, names=names) if module and module.startswith("torch"):
                parts = [*module.split("."), *(each.name for each in names)]
                yield from (part for part in parts if part.startswith("_"))
            case ast.Import(names=names):
                parts = [part for each in names for part in each.name.split(".")]
                yield from (part for part in parts if part.startswith("_") and part != "_thread")
            case ast.Constant(value=str(text)) if text.startswith(("torch._", "__dynamo", "_wrapped")):
                yield text
            case ast.FunctionDef(name=name) if "dynamo" in name:
                yield name


def test_every_private_part_that_is_used_is_checked() -> None:
    assert set(private_names(ast.parse(HOME.read_text("utf-8")))) == set(BEHAVIOUR)


def test_no_other_module_of_learn_uses_a_private_part_of_torch() -> None:
    """Torch's private names are told from ours by their owner: ours belong to `self` or to the module."""
    found = {
        f"{path.relative_to(LEARN)}: {name}"
        for path in LEARN.rglob("*.py")
        if path != HOME
        for name in private_names(ast.parse(path.read_text("utf-8")))
    }
    assert found == set()


@pytest.mark.parametrize(
    "code",
    ["torch._C", "tensor._version", "from torch._dynamo import x", "import torch._C"],
)
def test_the_rule_sees_what_it_is_for(code: str) -> None:
    assert list(private_names(ast.parse(code)))
