"""The result of an evaluation: its metrics, and which weights it measured. Knows nothing of how."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from w5xde.callbacks.weights import Weights


class Evaluation(dict[str, float]):
    """The metrics of one evaluation, by name.

    `step` and `epoch` are those of the weights that it measured: when the result is known, the run may be
    further. Both are None if there was no evaluation yet.
    """

    __slots__ = ("epoch", "read", "step")

    def __init__(
        self, metrics: Mapping[str, float] | None = None, step: int | None = None, epoch: int | None = None
    ) -> None:
        super().__init__(metrics or {})
        self.step = step
        self.epoch = epoch
        # Copies the weights that were measured, while callbacks are told of the result.
        self.read: Callable[[], Weights] | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.items())

    def weights(self) -> Weights:
        """A copy of the weights that were measured; only while `on_evaluate` runs, for they are not kept."""
        if self.read is None:
            raise RuntimeError("the weights that were measured can be read only while on_evaluate runs")
        return self.read()
