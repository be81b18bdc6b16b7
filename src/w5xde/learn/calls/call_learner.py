"""The learner of a pool: its model is the caller's, and so are the optimizers. It hands sums over.

The total of a call is its mean gradient: the learner advances the buffers as in any step, and keeps the total
until the caller has added it to the gradients of its parameters. Parameters change between calls, by code
that is not ours; the learner knows since which version they are as they are. Knows no nodes and no threads.
"""

from __future__ import annotations

import torch
from torch.optim import SGD

from w5xde.learn.calls.state_watch import StateWatch
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, Total
from w5xde.learn.torch_private import avoid_compiler_import


class CallLearner(Learner):
    """The caller's model, with a version for each call that has ended."""

    def __init__(self, flat: FlatModel) -> None:
        avoid_compiler_import()
        # An optimizer that is never asked to step: those of the caller do.
        super().__init__(flat, SGD(flat.module.parameters(), lr=0.0))
        self._watch = StateWatch(flat)
        # The versions since which the moving part of the state, and the rest of it, are as they are.
        self.moved_at = self.fixed_at = 0
        self._total: Contribution | None = None

    def begin_call(self) -> None:
        """Note what the caller has changed since the last call. Called before nodes are lent the next one."""
        changes = self._watch.look()
        if changes.moving:
            self.moved_at = self.version
        if changes.fixed:
            self.fixed_at = self.version
        self._total = None

    def apply(self, totals: list[Total]) -> list[float]:
        """Keep the sum of a call for its caller. Returns the sum of the sample losses."""
        (total,) = totals
        self._move_away_from_readers()
        self._advance_all_buffers(totals)
        self.version += 1
        if any(bool(total.contribution.vector.parts[i].any()) for i in self._buffer_parts):
            self.moved_at = self.version
        self._total = total.contribution
        return [total.contribution.loss_sum]

    def end_call(self) -> None:
        """Add the mean gradient of the call to the caller's parameters, as `backward` would."""
        total, self._total = self._total, None
        if total is not None:
            self._add_gradients(total)
        self._watch.remember()

    def let_go(self) -> None:
        """Give every parameter and buffer memory of its own again: the pool has ended."""
        for tensor in self.flat.tensors:
            tensor.data = tensor.data.clone()

    @torch.no_grad()
    def _add_gradients(self, total: Contribution) -> None:
        blueprint = self.flat.blueprint
        present = [entry for entry in blueprint.trained if entry not in total.absent]
        parameters = [self.flat.tensors[entry] for entry in present]
        # Nodes, and frames that come next, use the memory of the sum again.
        is_new = any(parameter.grad is None for parameter in parameters)
        raw = total.vector.raw.clone() if is_new else total.vector.raw
        for parameter, gradient in zip(parameters, blueprint.entries_in(raw, present), strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
