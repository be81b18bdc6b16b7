"""Callbacks: how a program follows a run, or the work of its node, while it goes on. Knows nothing else."""

from __future__ import annotations

from typing import Any


class Callback:
    """Override the methods that you need. The event loop of the run calls them, so they must return soon.

    `run` is a `w5xde.RunStatus`: the progress of the run, its rates and its nodes, and advice on the number
    of batches in a step (`run.gradient_noise_batches`, None while it is not known). A callback that raises is
    not called again, and training goes on.
    """

    def on_start(self, run: Any) -> None:
        """The coordinator listens; `run.address` is where."""

    def on_step(self, run: Any, step: int, loss: float) -> None:
        """An optimizer step was applied."""

    def on_evaluate(self, run: Any, metrics: dict[str, float]) -> None:
        """The model was evaluated."""

    def on_node_join(self, run: Any, node: str) -> None:
        """A node joined."""

    def on_node_leave(self, run: Any, node: str, reason: str) -> None:
        """A node left, or was lost."""

    def on_work(self, node: Any, batches: int, loss: float) -> None:
        """On a node: it computed some batches, with this mean loss. `node` holds its totals so far."""

    def on_end(self, run: Any, summary: dict[str, Any]) -> None:
        """The run is over; `summary` is what --json prints."""
