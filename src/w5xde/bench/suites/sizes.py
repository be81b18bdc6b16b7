"""`bench learn --sizes`: batches/s for models of many sizes, so that a size at which we are slow shows.

One node with one batch a step beside a plain loop, and two nodes with two batches a step beside DDP with two
processes, in turns. The models are residual networks of a given number of parameters and tensors, and their
optimizer is Adam as people write it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from w5xde.bench import jobs
from w5xde.bench.contestants.ddp import run_ddp
from w5xde.bench.contestants.plain import run_plain
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.pairs import Measured, in_turns, median, run_of_ours
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.progress import Say
from w5xde.learn.job.job import Job

INPUTS, OUTPUTS, SAMPLES = 16, 10, 1024
BATCH_SIZE = 16
# A narrower layer is no layer; such a size is left out.
WIDTH_MIN = 4
# Seconds that a turn takes besides its measurement, for the estimate.
START_SECONDS = 1.5


@dataclass(frozen=True, slots=True)
class SizesOptions:
    """The options of the benchmark."""

    params: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 25_000_000)
    tensors: tuple[int, ...] = (4, 40, 400)
    seconds: float = 2.0
    pairs: int = 1

    @property
    def cells(self) -> list[tuple[int, int]]:
        """The sizes for which there is a network."""
        return [
            (params, tensors)
            for params in self.params
            for tensors in self.tensors
            if width_for(params, tensors) >= WIDTH_MIN
        ]


def width_for(params: int, tensors: int) -> int:
    """The width of the network that has about this many parameters in this many tensors.

    Its layers are one to the width, `tensors / 2 - 2` between, and one from the width.
    """
    between, ends = tensors // 2 - 2, INPUTS + 1 + OUTPUTS
    if not between:
        return round(params / ends)
    slope = ends + between
    return round((math.sqrt(slope**2 + 4 * between * params) - slope) / (2 * between))


class Residual(nn.Module):
    """A network whose layers each add a little, so that a deep one computes with ordinary numbers."""

    def __init__(self, width: int, between: int) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, width)
        self.between = nn.ModuleList(nn.Linear(width, width) for _ in range(between))
        self.last = nn.Linear(width, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.relu(self.first(inputs))
        for layer in self.between:
            x = x + torch.relu(layer(x)) / len(self.between)
        guesses: Tensor = self.last(x)
        return guesses


def sized_job(params: int, tensors: int) -> Job:
    width, between = width_for(params, tensors), tensors // 2 - 2

    def data() -> TensorDataset:
        inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(0))
        return TensorDataset(inputs, inputs[:, :OUTPUTS].argmax(1))

    return Job(
        model=lambda: Residual(width, between), data=data, loss=jobs.classify, optimizer=jobs.adam(1e-4)
    )


def run_sizes(options: SizesOptions, say: Say) -> dict[str, Any]:
    """Measure every size."""
    warm_up()
    cells = options.cells
    seconds = 4 * options.pairs * len(cells) * (options.seconds + START_SECONDS)
    say(f"about {max(1, round(seconds / 60))} min for {len(cells)} sizes")
    return {
        "bench": "sizes",
        "batch_size": BATCH_SIZE,
        "pairs": options.pairs,
        "seconds": options.seconds,
        "rows": [_row(*cell, options, say) for cell in cells],
        "machine": machine(),
    }


def _row(params: int, tensors: int, options: SizesOptions, say: Say) -> dict[str, Any]:
    job = sized_job(params, tensors)
    about = f"{params:,} parameters, {tensors} tensors"
    seconds = options.seconds

    def ours(nodes: int) -> Measured:
        return run_of_ours(
            job, nodes, seconds, name="w5xde.bench:sizes", batch_size=BATCH_SIZE, batches_per_step=nodes
        )

    def pair(nodes: int, peer: str) -> dict[str, Any]:
        def theirs() -> Measured:
            if nodes == 1:
                return run_plain(job, BATCH_SIZE, seconds).summary()
            return run_ddp(job, nodes, BATCH_SIZE, seconds).summary()

        turns = in_turns(
            options.pairs,
            (f"w5xde, {nodes} node{'s' * (nodes > 1)}", lambda: ours(nodes)),
            (peer, theirs),
            lambda text: say(f"{about}: {text}"),
        )
        return {
            "ratio": sorted(turns.ratios)[len(turns.ratios) // 2],
            "batches_per_second": median(turns.ones, "batches_per_second"),
            "peer_batches_per_second": median(turns.others, "batches_per_second"),
        }

    return {
        "parameters": jobs.parameter_count(job),
        "tensors": tensors,
        "one_node": pair(1, "plain loop"),
        "two_nodes": pair(2, "DDP/gloo, 2 processes"),
    }
