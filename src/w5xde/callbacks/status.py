"""The state of a run and of a node as plain data, which views draw and callbacks receive.

Knows nothing of how its figures are counted: `meters` does that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.weights import Weights


class RunControl(Protocol):
    """What a callback can ask of its run."""

    def stop(self, reason: str) -> None: ...
    def read_weights(self, found: Callable[[Weights], None]) -> None: ...
    def save_best(self, evaluation: Evaluation, metric: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Best:
    """The weights in best.safetensors: after which step, and by which metric they are the best."""

    step: int
    epoch: int
    metric: str
    value: float


@dataclass(slots=True)
class NodeStatus:
    """One node at one moment."""

    name: str
    device: str
    state: str
    batches: int
    batches_per_second: float
    share: float
    loss: float | None
    # The share of its time in which it waits for work.
    waiting: float
    network_per_second: float = 0.0
    # The share of its time in which it computes.
    computing: float = 0.0
    # None: another machine's node, or one that this coordinator did not start.
    pid: int | None = None
    # The id of its machine, which all nodes there have; empty if it is not known.
    machine: str = ""


@dataclass(slots=True)
class RunStatus:
    """The run at one moment."""

    run: str
    mode: str
    address: str
    parameters: int
    step: int = 0
    steps_total: int | None = None
    epoch: int = 0
    epochs_total: int | None = None
    batches: int = 0
    samples: int = 0
    durable_steps: int = 0
    seconds: float = 0.0
    seconds_total: float | None = None
    loss: float | None = None
    # The newest evaluation, with the step and the epoch of the weights that it measured.
    evaluation: Evaluation = field(default_factory=Evaluation)
    # Evaluations that were due and skipped; whether training waits for one now, and has waited in all.
    evaluations_skipped: int = 0
    waits_for_evaluation: bool = False
    evaluation_wait_seconds: float = 0.0
    # None: no best.safetensors was written.
    best: Best | None = None
    # The learning rate of each of the optimizer's groups, for the next step; in rounds mode nodes multiply it
    # by `round_rate`.
    learning_rates: list[float] = field(default_factory=list)
    samples_per_second: float = 0.0
    batches_per_second: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    # The part of bytes_sent that is batches, or numbers of samples.
    data_bytes_sent: int = 0
    sent_per_second: float = 0.0
    received_per_second: float = 0.0
    batches_relent: int = 0
    # All traffic in both directions, divided by the samples that were applied; None: there are none yet.
    bytes_per_sample: float | None = None
    # In rounds mode: rounds that were applied, and the steps of the next one if its epoch has as many left.
    rounds: int = 0
    round_steps: int = 0
    # The factor on the job's learning rate.
    round_rate: float = 1.0
    loss_average: float | None = None
    staleness_mean: float = 0.0
    staleness_max: int = 0
    # How many times smaller gradients and parameters became by encoding; None: none was sent.
    compression_ratio: float | None = None
    # Of the coordinator and the nodes it started.
    memory_pss_bytes: int = 0
    # The robust mean that replaces the sum of a step, and the number of steps with too few nodes for it.
    robust: str = "off"
    degraded_steps: int = 0
    # With --verify: batches of answers computed again here, and of chosen ones for which that failed.
    verified_batches: int = 0
    unverified_batches: int = 0
    # With --scale-for-batch: what was changed in the optimizer, in a sentence.
    scaling: str = ""
    # An estimate of how many batches a step are useful, None while it is not known; and a sentence about it.
    gradient_noise_batches: float | None = None
    gradient_noise: str = ""
    nodes: list[NodeStatus] = field(default_factory=list)
    # None: of this status nothing can be asked.
    control: RunControl | None = field(default=None, repr=False, compare=False)

    def stop(self, reason: str = "") -> None:
        """End the run in order: the step that has begun is completed, and a checkpoint is written.

        The summary says why. May be called from any thread.
        """
        self._control.stop(reason)

    def weights(self, found: Callable[[Weights], None]) -> None:
        """Call `found(weights)` with a copy of the model's weights, as soon as it is made.

        Asked for in `on_step`, they are those of that step in mode sync; `weights.step` says of which step
        they are. `found` is called by the event loop, as callbacks are, and must return soon.
        """
        self._control.read_weights(found)

    def save_best(self, metrics: Evaluation, metric: str) -> None:
        """Write the weights that were measured as best.safetensors; only while `on_evaluate` runs."""
        self._control.save_best(metrics, metric)

    @property
    def _control(self) -> RunControl:
        if self.control is None:
            raise RuntimeError("this status only shows a run, and cannot change it")
        return self.control

    @property
    def working(self) -> int:
        """How many nodes are working."""
        return sum(node.state == "working" for node in self.nodes)

    @property
    def done(self) -> float | None:
        """The part of the run that is done, 0 to 1, by the limit that is reached first; None: no limit."""
        parts = []
        if self.steps_total:
            parts.append(self.step / self.steps_total)
        if self.seconds_total:
            parts.append(self.seconds / self.seconds_total)
        return min(1.0, max(parts)) if parts else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the limit that is reached first; None if that cannot be known."""
        if not self.working:
            return None
        left = []
        if self.steps_total and self.step and self.seconds > 0:
            left.append((self.steps_total - self.step) * self.seconds / self.step)
        if self.seconds_total:
            left.append(self.seconds_total - self.seconds)
        return max(0.0, min(left)) if left else None

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the optimizer's first group, for the next step."""
        return self.learning_rates[0] if self.learning_rates else None

    def row(self) -> dict[str, Any]:
        """One line of metrics.jsonl."""
        return {
            "seconds": round(self.seconds, 3),
            "step": self.step,
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "durable_steps": self.durable_steps,
            "degraded_steps": self.degraded_steps,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "learning_rates": self.learning_rates,
            "evaluation": self.evaluation,
            "evaluation_step": self.evaluation.step,
            "evaluation_epoch": self.evaluation.epoch,
            "evaluations_skipped": self.evaluations_skipped,
            "samples_per_second": round(self.samples_per_second, 3),
            "batches_per_second": round(self.batches_per_second, 3),
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "data_bytes_sent": self.data_bytes_sent,
            "batches_relent": self.batches_relent,
            "bytes_per_sample": self.bytes_per_sample,
            "rounds": self.rounds,
            "round_steps": self.round_steps,
            "computing": {node.name: round(node.computing, 4) for node in self.nodes},
            "staleness_mean": round(self.staleness_mean, 3),
            "compression_ratio": self.compression_ratio,
            "memory_pss_bytes": self.memory_pss_bytes,
            "gradient_noise_batches": self.gradient_noise_batches,
            "nodes": {node.name: node.batches for node in self.nodes},
        }


@dataclass(slots=True)
class NodeReport:
    """The totals of one node, for the user who started it."""

    name: str
    run: str = ""
    # Batches that it computed, and how many of them are in steps of the model, as far as it was told.
    batches: int = 0
    counted: int = 0
    # Whether the run is over, and not only this node's part in it.
    over: bool = False
    rejected: int = 0
    seconds_busy: float = 0.0
    seconds_waiting: float = 0.0
    seconds_network: float = 0.0
    seconds_codec: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    loss: float | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """Its name, as people see it."""
        return self.name

    def summary(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(slots=True)
class CrewReport(NodeReport):
    """The totals of all nodes that one command ran on its machine, and of each of their processes."""

    nodes: list[NodeReport] = field(default_factory=list)

    @property
    def title(self) -> str:
        count = len({node.name for node in self.nodes if node.run})
        return self.name if count < 2 else f"{self.name} ({count} nodes)"

    @classmethod
    def of(cls, name: str, reports: list[NodeReport]) -> CrewReport:
        """Add the reports up; the loss is the mean of those that have one."""
        total = cls(name, nodes=reports)
        for report in reports:
            for each in dataclasses.fields(NodeReport):
                value = getattr(report, each.name)
                if each.name != "loss" and isinstance(value, int | float):
                    setattr(total, each.name, getattr(total, each.name) + value)
            total.run = total.run or report.run
        losses = [report.loss for report in reports if report.loss is not None]
        total.loss = sum(losses) / len(losses) if losses else None
        return total
