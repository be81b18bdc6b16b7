"""How far precision moves gradients, against what the canary allows: `python -m tests.learn.precision`.

For networks of a few kinds and some seeds: the largest difference of any layer, in parts of what is allowed.
Double precision stands for an honest machine of another kind. Below 1 a node passes, above it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from tests.learn.pool import CPU, welcome_of
from w5xde import Job
from w5xde.config import Settings
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.trust.canary import CanaryAnswer, ExpectedCanary

SEEDS = 8
# Bits that a product's factors keep.
TF32, BF16 = 10, 7


class Block(nn.Module):
    """A residual block whose branch begins as nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        nn.init.zeros_(self.branch[-1].weight)

    def forward(self, pictures: Tensor) -> Tensor:
        return torch.relu(pictures + self.branch(pictures))


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))


def smooth() -> nn.Module:
    layer = nn.TransformerEncoderLayer(96, 4, 384, 0.0, activation="gelu", batch_first=True)
    return nn.Sequential(nn.Flatten(2), nn.Linear(1024, 96), layer, nn.Flatten(), nn.Linear(288, 10))


def pooled() -> nn.Module:
    convolutions = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
    ]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 49, 10))


def residual() -> nn.Module:
    blocks = [Block(32) for _ in range(6)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


class Rounded(TorchDispatchMode):
    """Every factor of a product keeps so many bits."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._dropped = 23 - bits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if "mm" in name or "conv" in name:
            args = [self._rounded(each) for each in args]
        return function(*args, **(kwargs or {}))

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        half = 1 << (self._dropped - 1)
        return ((value.contiguous().view(torch.int32) + half) >> self._dropped << self._dropped).view(
            torch.float32
        )


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1])


def in_double(model: nn.Module, batch: Any) -> Tensor:
    named = [*model.named_parameters(), *model.named_buffers()]
    doubled = {name: each.double() if each.is_floating_point() else each for name, each in named}
    return cross_entropy(torch.func.functional_call(model, doubled, (batch[0].double(),)), batch[1]).float()


def rounded(bits: int) -> Callable[[nn.Module, Any], Tensor]:
    def computed(model: nn.Module, batch: Any) -> Tensor:
        # Gradients are rounded too, so they are computed here; what is returned has these very gradients.
        parameters = list(model.parameters())
        with Rounded(bits):
            gradients = torch.autograd.grad(loss(model, batch), parameters)
        pairs = zip(gradients, parameters, strict=True)
        return torch.stack([(gradient * parameter).sum() for gradient, parameter in pairs]).sum()

    return computed


WAYS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "double": in_double,
    "TF32": rounded(TF32),
    "bfloat16": rounded(BF16),
}


def excess(expectation: ExpectedCanary, given: CanaryAnswer) -> float:
    """The largest difference of any layer, in parts of what is allowed."""
    return float((expectation._differences(given.rows) / expectation._limits).max())


def main() -> None:
    torch.set_num_threads(1)
    for model in (plain, smooth, pooled, residual):
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(SEEDS):

            def data(seed: int = seed) -> TensorDataset:
                generator = torch.Generator().manual_seed(seed)
                return TensorDataset(torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4))

            job = Job(model=model, data=data, loss=loss, optimizer=torch.optim.SGD)
            prepared = prepare(job, Settings(seed=seed, batch_size=4))
            if prepared.canary is None:
                raise SystemExit(prepared.canary_trouble)
            welcome = welcome_of(prepared)
            for way, other in WAYS.items():
                parts = prepare_node(
                    Job(model=model, data=data, loss=other, optimizer=torch.optim.SGD), welcome, CPU
                )
                parts.prove(welcome, prepared.canary.body)
                if parts.proof is not None:
                    found[way].append(excess(prepared.canary, parts.proof))
        shown = ", ".join(f"{way} {min(each):.2g} to {max(each):.2g}" for way, each in found.items())
        print(f"{model.__name__}: {shown}")


if __name__ == "__main__":
    main()
