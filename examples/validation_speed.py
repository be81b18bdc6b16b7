"""Measure a training run whose validation set is lent to nodes, against one whose coordinator evaluates it.

    python examples/validation_speed.py [--pairs 3] [--nodes 2] [--evaluate-every 50]

Both runs have the same model, data and epochs, and give the same metrics. Prints the seconds of the whole
call (median, and each), of training, and of those how long training waited for evaluations.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import w5xde

EPOCHS, BATCH, HELD_OUT_BATCH = 4, 32, 128


def points(count: int, seed: int) -> TensorDataset:
    inputs = torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :8].sum(1).remainder(4).floor().long())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))


def loss(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def measure(net: nn.Module, batch: Any) -> dict[str, Tensor]:
    scores = net(batch[0])
    return {
        "loss": cross_entropy(scores, batch[1]),
        "accuracy": (scores.argmax(1) == batch[1]).float().mean(),
    }


def held_out() -> DataLoader[Any]:
    return DataLoader(points(40_000, seed=2), batch_size=HELD_OUT_BATCH)


HELD_OUT: list[Any] = []


def evaluate(net: nn.Module) -> dict[str, float]:
    if not HELD_OUT:
        HELD_OUT.extend(held_out())
    sums, samples = {"loss": 0.0, "accuracy": 0.0}, 0
    for batch in HELD_OUT:
        for name, value in measure(net, batch).items():
            sums[name] += len(batch[1]) * float(value)
        samples += len(batch[1])
    return {name: total / samples for name, total in sums.items()}


PARTS: dict[str, Any] = {
    "model": model,
    "data": lambda: points(6_400, seed=1),
    "loss": loss,
    "optimizer": lambda params: torch.optim.Adam(params, lr=1e-3),
}
WAYS = {
    "evaluate= at the coordinator": w5xde.Job(**PARTS, evaluate=evaluate),
    "validation= lent to nodes": w5xde.Job(**PARTS, validation=held_out, measure=measure),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--evaluate-every", type=int, help="steps; by default after each epoch of 100")
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in WAYS}
    metrics: dict[str, dict[str, float]] = {}
    for _ in range(given.pairs):
        for name, job in WAYS.items():
            with tempfile.TemporaryDirectory() as runs:
                begun = time.perf_counter()
                result = w5xde.train(
                    job,
                    nodes=given.nodes,
                    epochs=EPOCHS,
                    batch_size=BATCH,
                    evaluate_every=given.evaluate_every,
                    runs=runs,
                )
                seconds = time.perf_counter() - begun
            summary = result.summary
            found[name].append((seconds, summary["seconds"], summary["evaluation_wait_seconds"]))
            metrics[name] = dict(summary["metrics"])
    for name, rows in found.items():
        whole, training, waited = (statistics.median(column) for column in zip(*rows, strict=True))
        each = ", ".join(f"{row[0]:.2f}" for row in rows)
        print(f"{name}: {whole:.2f} s ({each}), training {training:.2f} s, of which {waited:.2f} s waiting")
        print(f"  {metrics[name]}")


if __name__ == "__main__":
    main()
