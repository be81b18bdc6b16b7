"""Meters: what happened in a run, in total, for each node, and in the last seconds.

Only count what callers report. Know no sockets, tensors or clock: callers pass `now`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.status import NodeStatus, RunStatus
from w5xde.config import Settings
from w5xde.control.events import Step
from w5xde.control.steps.cut import Aside, Progress
from w5xde.control.view import CoreView
from w5xde.messages import Update
from w5xde.runtime.durable.resume import KeptMeters, KeptNode, Restored
from w5xde.runtime.telemetry.gradient_noise import GradientNoise
from w5xde.runtime.telemetry.lease_trace import LeaseTrace
from w5xde.runtime.telemetry.loss_band import LossBand
from w5xde.sanitize import sane_seconds
from w5xde.tree import Span

# Rates are means over this long: short enough to follow a change, long enough not to jitter.
RECENT_SECONDS = 3.0
# The loss shown is a moving mean over about this many steps.
LOSS_STEPS = 20


class Rate:
    """How fast a count has grown in the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, now: float, count: float) -> None:
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[0][0] > RECENT_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        if len(self._points) < 2:
            return 0.0
        (then, before), (now, count) = self._points[0], self._points[-1]
        return (count - before) / (now - then) if now > then else 0.0


@dataclass(slots=True)
class NodeMeter:
    """One node's part in the run, over all its connections."""

    name: str
    device: str = "cpu"
    state: str = "joining"
    batches: int = 0
    samples: int = 0
    seconds_busy: float = 0.0
    # The part of these that it was on a core, so not waiting for other processes of its machine.
    seconds_on_core: float = 0.0
    seconds_waiting: float = 0.0
    seconds_network: float = 0.0
    seconds_codec: float = 0.0
    # All traffic of its connections; and its gradients and parameters, before and after encoding.
    bytes_sent: int = 0
    bytes_received: int = 0
    vector_bytes: int = 0
    vector_bytes_encoded: int = 0
    loss: float | None = None
    # Steps for which its update was the last one.
    steps_ended: int = 0
    # The codec of its last gradient.
    codec_up: str = ""
    pid: int | None = None
    machine: str = ""
    rate: Rate = field(default_factory=Rate)
    network_rate: Rate = field(default_factory=Rate)

    def moved_vectors(self, raw_bytes: int, encoded_bytes: int) -> None:
        """Count gradients received or parameters sent."""
        self.vector_bytes += raw_bytes
        self.vector_bytes_encoded += encoded_bytes

    def answered(self, update: Update, computed_seconds: float) -> None:
        """Count where the node says that its time went until this update."""
        self.seconds_busy += computed_seconds
        self.seconds_on_core += sane_seconds(update.core_seconds)
        self.seconds_waiting += sane_seconds(update.waited_seconds)
        self.seconds_network += sane_seconds(update.network_seconds)
        self.seconds_codec += sane_seconds(update.codec_seconds)
        if update.answers:
            self.codec_up = update.answers[-1].codec

    def row(self, batches_total: int) -> NodeStatus:
        spent = (self.seconds_busy + self.seconds_waiting) or 1.0
        return NodeStatus(
            name=self.name,
            device=self.device,
            state=self.state,
            batches=self.batches,
            batches_per_second=self.rate.per_second if self.state != "gone" else 0.0,
            share=self.batches / batches_total,
            loss=self.loss,
            waiting=self.seconds_waiting / spent,
            computing=self.computing,
            network_per_second=self.network_rate.per_second if self.state != "gone" else 0.0,
            pid=self.pid,
            machine=self.machine,
        )

    def summary(self) -> dict[str, Any]:
        """What a checkpoint keeps of the node, and --json prints."""
        kept = {key: getattr(self, key) for key in KeptNode.__struct_fields__}
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in kept.items()}

    @property
    def computing(self) -> float:
        """The share of its time in which it computes."""
        return self.seconds_busy / ((self.seconds_busy + self.seconds_waiting) or 1.0)


class Meters:
    """Everything counted in one run."""

    def __init__(self, noise: GradientNoise | None = None) -> None:
        # Advice on the number of batches in a step.
        self.noise = noise or GradientNoise(1, unknown="not measured")
        self.nodes: dict[str, NodeMeter] = {}
        # When some of the leases were lent and answered.
        self.trace = LeaseTrace()
        # The losses of the steps since the last row of metrics.
        self.loss_band = LossBand()
        self.bytes_sent = 0
        self.bytes_received = 0
        # Bytes of work that was sent, by epoch: batches, or numbers of samples.
        self.data_bytes: Counter[int] = Counter()
        # Sent and received in earlier lives of the run.
        self._bytes_before = (0, 0)
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.loss_mean: float | None = None
        # Over all steps, and the number of steps.
        self._loss_sum = 0.0
        self._losses = 0
        # Staleness: updates that were applied between the version an update was computed on and its own.
        self._staleness_sum = 0
        self._folds = 0
        self.staleness_max = 0
        # Of the coordinator and the nodes that it started, at the last measurement.
        self.memory_pss_bytes = 0
        self.evaluation = Evaluation()
        self.learning_rates: list[float] = []
        self.samples_rate = Rate()
        self.batches_rate = Rate()
        self.sent_rate = Rate()
        self.received_rate = Rate()

    def node(self, name: str) -> NodeMeter:
        """The meter of a node, new if the node is."""
        return self.nodes.get(name) or self.nodes.setdefault(name, NodeMeter(name))

    def sent_data(self, epoch: int, count: int) -> None:
        """Count the bytes of a message with batches."""
        self.data_bytes[epoch] += count

    def folded(self, staleness: int) -> None:
        """Count an accepted update that is this stale."""
        self._staleness_sum += staleness
        self._folds += 1
        self.staleness_max = max(self.staleness_max, staleness)

    @property
    def staleness_mean(self) -> float:
        return self._staleness_sum / (self._folds or 1)

    @property
    def loss_average(self) -> float | None:
        return self._loss_sum / self._losses if self._losses else None

    @property
    def compression_ratio(self) -> float | None:
        """How many times smaller encoding made the vectors; None if none was sent."""
        encoded = sum(node.vector_bytes_encoded for node in self.nodes.values())
        return sum(node.vector_bytes for node in self.nodes.values()) / encoded if encoded else None

    def shared(self, step: Step, times: int = 1) -> None:
        """Count each node's share of a step when it is decided; with `times=-1`, when it is undone."""
        for start, stop, node, _ in step.shares:
            meter = self.node(node)
            meter.batches += times * (stop - start) * step.plan.leaf_batches
            meter.samples += times * step.plan.samples_of(Span(start, stop))

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of the meters."""
        meters = KeptMeters(
            loss_first=self.loss_first,
            loss_last=self.loss_last,
            loss_mean=self.loss_mean,
            loss_sum=self._loss_sum,
            losses=self._losses,
            evaluation=dict(self.evaluation),
            evaluation_step=self.evaluation.step,
            evaluation_epoch=self.evaluation.epoch,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            data_bytes=dict(self.data_bytes),
            nodes=[KeptNode(**node.summary()) for node in self.nodes.values()],
        )
        return {"meters": msgspec.to_builtins(meters)}

    def resume(self, restored: Restored) -> None:
        """Continue the counts of a restored run."""
        kept = restored.meters
        self.loss_first, self.loss_last, self.loss_mean = kept.loss_first, kept.loss_last, kept.loss_mean
        self._loss_sum, self._losses = kept.loss_sum, kept.losses
        # JSON has no NaN: a score that was NaN is stored as null and read as None.
        metrics = {key: math.nan if value is None else value for key, value in kept.evaluation.items()}
        self.evaluation = Evaluation(metrics, kept.evaluation_step, kept.evaluation_epoch)
        self._bytes_before = (kept.bytes_sent, kept.bytes_received)
        self.data_bytes = Counter(kept.data_bytes)
        for node in kept.nodes:
            self.nodes[node.name] = NodeMeter(**msgspec.structs.asdict(node))
        for replayed in restored.replayed:
            self.shared(replayed.step)
            for _ in range(replayed.step.steps):
                self.stepped(replayed.loss_sum / replayed.step.samples)
        for meter in self.nodes.values():
            meter.state = "gone"

    def stepped(self, loss: float) -> None:
        """Count an applied step with its mean loss."""
        if self.loss_first is None:
            self.loss_first = loss
        self.loss_last = loss
        self.loss_band.add(loss)
        self._loss_sum += loss
        self._losses += 1
        before = loss if self.loss_mean is None else self.loss_mean
        self.loss_mean = before + (loss - before) / LOSS_STEPS

    def sample(self, now: float, progress: Progress, bytes_sent: int, bytes_received: int) -> None:
        """Note all counts at this time, for the rates."""
        before_sent, before_received = self._bytes_before
        self.bytes_sent, self.bytes_received = before_sent + bytes_sent, before_received + bytes_received
        self.samples_rate.add(now, progress.samples)
        self.batches_rate.add(now, progress.batches)
        self.sent_rate.add(now, bytes_sent)
        self.received_rate.add(now, bytes_received)
        for meter in self.nodes.values():
            meter.rate.add(now, meter.batches)
            meter.network_rate.add(now, meter.bytes_sent + meter.bytes_received)

    def status(
        self,
        *,
        run: str,
        address: str,
        parameters: int,
        settings: Settings,
        view: CoreView,
        seconds: float,
        scaling: str,
        round_rate: float,
    ) -> RunStatus:
        """The status of the run at this moment."""
        progress, members = view.progress, view.members
        total = sum(node.batches for node in self.nodes.values()) or 1
        return RunStatus(
            run=run,
            mode=settings.mode,
            address=address,
            parameters=parameters,
            step=progress.steps,
            steps_total=view.plan.steps_total,
            epoch=progress.epochs,
            epochs_total=settings.epoch_limit,
            batches=progress.batches,
            samples=progress.samples,
            durable_steps=progress.durable_steps,
            seconds=seconds,
            seconds_total=settings.seconds,
            loss=self.loss_mean,
            evaluation=self.evaluation,
            evaluations_skipped=progress.evaluations_skipped,
            waits_for_evaluation=view.waits_for_evaluation,
            evaluation_wait_seconds=progress.evaluation_wait_seconds,
            learning_rates=self.learning_rates,
            samples_per_second=self.samples_rate.per_second,
            batches_per_second=self.batches_rate.per_second,
            bytes_sent=self.bytes_sent,
            bytes_received=self.bytes_received,
            data_bytes_sent=self.data_bytes.total(),
            sent_per_second=self.sent_rate.per_second,
            received_per_second=self.received_rate.per_second,
            batches_relent=view.batches_relent,
            bytes_per_sample=(self.bytes_sent + self.bytes_received) / progress.samples
            if progress.samples
            else None,
            rounds=progress.rounds,
            round_steps=view.round_steps,
            round_rate=round_rate,
            scaling=scaling,
            gradient_noise_batches=self.noise.batches,
            gradient_noise=self.noise.text(len(members), members.parallel),
            loss_average=self.loss_average,
            staleness_mean=self.staleness_mean,
            staleness_max=self.staleness_max,
            compression_ratio=self.compression_ratio,
            memory_pss_bytes=self.memory_pss_bytes,
            robust=settings.robust,
            degraded_steps=progress.degraded_steps,
            verified_batches=progress.verified_batches,
            unverified_batches=progress.unverified_batches,
            nodes=[node.row(total) for node in self.nodes.values()],
        )

    def summary(self, status: RunStatus, aside: list[Aside]) -> dict[str, Any]:
        """What --json prints, but for the weights."""
        return {
            "run": status.run,
            "mode": status.mode,
            "steps": status.step,
            "durable_steps": status.durable_steps,
            "robust": status.robust,
            "degraded_steps": status.degraded_steps,
            "verified_batches": status.verified_batches,
            "unverified_batches": status.unverified_batches,
            "bad_batches": [
                {"epoch": each.epoch + 1, "batch": each.batch, "reason": each.reason, "nodes": each.nodes}
                for each in aside
            ],
            "epochs": status.epoch,
            "batches": status.batches,
            "samples": status.samples,
            "seconds": round(status.seconds, 6),
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "loss_average": self.loss_average,
            "metrics": self.evaluation,
            "metrics_step": self.evaluation.step,
            "metrics_epoch": self.evaluation.epoch,
            "evaluations_skipped": status.evaluations_skipped,
            "evaluation_wait_seconds": round(status.evaluation_wait_seconds, 6),
            "learning_rates": self.learning_rates,
            "bytes_sent": status.bytes_sent,
            "bytes_received": status.bytes_received,
            "data_bytes_sent": status.data_bytes_sent,
            "data_bytes_by_epoch": [
                self.data_bytes[epoch] for epoch in range(max(self.data_bytes, default=-1) + 1)
            ],
            "batches_relent": status.batches_relent,
            "bytes_per_sample": status.bytes_per_sample,
            "rounds": status.rounds,
            "round_steps": status.round_steps,
            "round_rate": status.round_rate,
            "batches_per_second": status.batches / status.seconds if status.seconds else 0.0,
            "network_bytes_per_second": (status.bytes_sent + status.bytes_received) / status.seconds
            if status.seconds
            else 0.0,
            "compression_ratio": self.compression_ratio,
            "staleness_mean": round(self.staleness_mean, 3),
            "staleness_max": self.staleness_max,
            "memory_pss_bytes": self.memory_pss_bytes,
            "gradient_noise_batches": status.gradient_noise_batches,
            "gradient_noise": status.gradient_noise,
            "spread": self._spread(),
            "nodes": [
                node.summary() | {"computing": round(node.computing, 4)} for node in self.nodes.values()
            ],
        }

    def _spread(self) -> dict[str, dict[str, float]]:
        """The minimum and maximum of some counts over all nodes that computed a batch."""
        rows = [node.summary() for node in self.nodes.values() if node.batches]
        keys = ("batches", "seconds_busy", "seconds_waiting", "seconds_network", "seconds_codec")
        if not rows:
            return {}
        return {
            key: {"min": min(row[key] for row in rows), "max": max(row[key] for row in rows)} for key in keys
        }
