"""Callbacks: how a program follows a run, or the work of its node, while it goes on. Knows nothing else."""

from __future__ import annotations

from typing import Any

from w5xde.callbacks.evaluation import Evaluation
from w5xde.callbacks.status import NodeReport, RunStatus


class Callback:
    """Override the methods that you need. The event loop of the run calls them, so they must return soon.

    `run` is the progress of the run, its rates and its nodes, and advice on the number of batches in a step
    (`run.gradient_noise_batches`, None while it is not known). If a method raises, the error is printed with
    your line, training goes on, and of this callback only `on_end` is called from then on.

    A callback can end the run (`run.stop(reason)`) and read weights: `run.weights(found)`, and those that
    were measured, `metrics.weights()`.
    """

    # The metric that this callback follows: a run whose evaluations do not have it is refused.
    metric: str = ""
    # True: the results of evaluations decide what this callback does with the run. Training then waits for
    # each evaluation until the callback has heard of it, unless evaluations may be skipped.
    decides: bool = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of this callback: numbers, text, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The run is resumed; `state` is what `state_dict` returned for the checkpoint."""

    def on_start(self, run: RunStatus) -> None:
        """The coordinator listens; `run.address` is where."""

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        """An optimizer step was applied."""

    def on_evaluate(self, run: RunStatus, metrics: Evaluation) -> None:
        """The model was evaluated: its weights of `metrics.step`, which `run.step` may be beyond."""

    def on_metrics(self, run: RunStatus, row: dict[str, Any]) -> None:
        """A row was written to metrics.jsonl: four times a second at first, after half a minute once."""

    def on_node_join(self, run: RunStatus, node: str) -> None:
        """A node joined."""

    def on_node_leave(self, run: RunStatus, node: str, reason: str) -> None:
        """A node left, or was lost."""

    def on_work(self, node: NodeReport, batches: int, loss: float) -> None:
        """On a node: it computed some batches, with this mean loss. `node` holds its totals so far."""

    def on_end(self, run: RunStatus, summary: dict[str, Any]) -> None:
        """The run is over; `summary` is what --json prints."""
