"""The hand-over: how the state of an optimizer goes from one round to the next, though no node keeps it.

A column of a round may be computed by any node, so that all it starts from must be known to all nodes. Each
column therefore returns a summary of its optimizer's state, the summaries are averaged, and the next round
starts from their mean:

    none       SGD without momentum has no state
    movement   SGD: the momentum is the last movement of the parameters, divided by the sum of its rates
    factored   Adam, AdamW: of the second moments the mean of each row and of each column of a matrix; the
               first moment follows from the last movement, as for SGD
    mean:a,b   every other optimizer of torch: its tensors themselves, which costs as much as the parameters

A column returns what it adds to second moments, not the moments themselves: these hardly move in a round, and
would never move if they were rounded each time.

Starting each round with an optimizer that has made no step needs twice the samples (docs/findings.md). Knows
no nodes and no codecs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop

from w5xde.errors import JobError
from w5xde.learn.model.layout import Blueprint
from w5xde.message_types import StepRates
from w5xde.messages import AVERAGED, CARRIED, Entry, Layout

NONE, MOVEMENT, FACTORED, MEAN = "none", "movement", "factored", "mean"
# Adam's best rate in rounds is between that for steps of one batch and twice that; SGD's is the same.
ADAM_RATE = 1.5
# The movement of a round is a little more than its last steps would make: this share of it as Adam's first
# moment needs fewer samples than all of it. Measured, see findings.
ADAM_MOMENTUM = 0.8
# Their state is one tensor like the parameter for each name, and a counter of steps.
_AVERAGED = (Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, RAdam)
_STEP = "step"
# No optimizer of torch has more tensors for a parameter; each takes as much memory as the parameters.
NAMES_MAX = 4


def usual_rate(hand_over: str) -> float:
    """The factor on the job's learning rate in rounds mode, if the user sets none: measured, see findings."""
    return ADAM_RATE if hand_over == FACTORED else 1.0


def choose_hand_over(optimizer: Optimizer, stepped: Optimizer | None) -> str:
    """How to hand the state of this optimizer over; JobError if that is not possible.

    `stepped` is another optimizer of the same job that has made a step, so that its state shows its names.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    if kind is SGD:
        return MOVEMENT if any(group["momentum"] for group in groups) else NONE
    is_real = not any(parameter.is_complex() for group in groups for parameter in group["params"])
    if kind in (Adam, AdamW) and is_real and not any(group["amsgrad"] for group in groups):
        return FACTORED
    if kind in _AVERAGED and is_real and stepped is not None:
        names = {name for state in stepped.state.values() for name in state if name != _STEP}
        return f"{MEAN}:{','.join(sorted(names))}"
    known = ", ".join(["SGD", *(each.__name__ for each in _AVERAGED)])
    raise JobError(
        f"rounds cannot hand the state of {kind.__name__} over from one round to the next",
        code="W5-235",
        why=f"any node may continue where another one stopped; that is known of torch's {known}, with"
        " parameters that are real numbers (SGD: any)",
        fix="use one of these, or --mode sync",
    )


class HandOver:
    """Summarizes the state of an optimizer, and makes a state from the mean of such summaries."""

    def __init__(self, spec: str, layout: Layout) -> None:
        """`layout` is that of the model. ValueError if the spec is unknown."""
        kind, _, names = spec.partition(":")
        self._names = names.split(",") if names else []
        is_known = kind in (NONE, MOVEMENT, FACTORED) and not names
        if not is_known and not (kind == MEAN and 0 < len(self._names) <= NAMES_MAX):
            raise ValueError(f"no hand-over is called {spec!r}")
        self._kind = kind
        trained = [entry for entry in layout.entries if entry.role == "trained"]
        carried = [each for entry in trained for each in self._carried(entry)]
        # What updates are made of: the entries of the model, and the statistics that they carry.
        self.vectors = Blueprint(Layout([*layout.entries, *carried]))
        first = len(layout.entries)
        self._entries = range(first, first + len(carried))

    def _carried(self, entry: Entry) -> list[Entry]:
        """The statistics of a trained parameter that updates carry."""
        if self._kind == MEAN:
            return [Entry(f"{entry.name}/{name}", "float32", entry.shape, AVERAGED) for name in self._names]
        if self._kind != FACTORED:
            return []
        if _is_factored(entry.shape):
            rows, columns = entry.shape[0], math.prod(entry.shape[1:])
            return [
                Entry(f"{entry.name}/rows", "float32", (rows,), CARRIED),
                Entry(f"{entry.name}/columns", "float32", (columns,), CARRIED),
            ]
        return [Entry(f"{entry.name}/all", "float32", entry.shape, CARRIED)]

    def _of(self, parameters: Sequence[Tensor], raw: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Each trained parameter, in the order of the layout, and its statistics in the bytes of a vector."""
        found = iter(self.vectors.entries_in(raw, self._entries))
        for parameter in parameters:
            if self._kind == MEAN:
                yield parameter, [next(found) for _ in self._names]
            elif self._kind == FACTORED:
                yield parameter, [next(found) for _ in range(1 + _is_factored(parameter.shape))]
            else:
                yield parameter, []

    # --- after a column ---------------------------------------------------------------------------

    def summarize(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], raw: Tensor, last: Tensor | None, steps: int
    ) -> None:
        """Write the statistics of a column of so many steps into the bytes of a vector.

        `last` is what the column started from, as in `restore`.
        """
        before = [each for _, each in self._of(parameters, last)] if last is not None else None
        for place, (parameter, statistics) in enumerate(self._of(parameters, raw)):
            state = optimizer.state.get(parameter, {})
            if self._kind == MEAN:
                for name, into in zip(self._names, statistics, strict=True):
                    kept = state.get(name)
                    into.copy_(kept) if isinstance(kept, Tensor) else into.zero_()
            elif self._kind == FACTORED:
                decay = _power(_decays(optimizer).get(parameter, 0.0), steps)
                started = before[place] if before is not None else [None] * len(statistics)
                now = _factors(state.get("exp_avg_sq"), statistics)
                for into, reached, old in zip(statistics, now, started, strict=True):
                    fresh = reached if old is None else reached - decay * old
                    # Never negative, and zero if the parameter got no gradient; rounding may leave a trace.
                    into.copy_(fresh.div(1 - decay).clamp_(min=0.0))

    def accumulate(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], last: Tensor | None, new: Tensor, steps: int
    ) -> None:
        """Turn the statistics of a round, in the bytes of a vector, into those of all rounds until then."""
        if self._kind != FACTORED:
            return
        decays = _decays(optimizer)
        before = [each for _, each in self._of(parameters, last)] if last is not None else None
        for place, (parameter, statistics) in enumerate(self._of(parameters, new)):
            decay = _power(decays.get(parameter, 0.0), steps)
            for number, fresh in enumerate(statistics):
                fresh.mul_(1 - decay)
                if before is not None:
                    fresh.add_(decay * before[place][number])

    # --- before a column --------------------------------------------------------------------------

    def restore(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], last: Tensor | None, rates: StepRates
    ) -> None:
        """Give an optimizer that has made no step the state in which a column starts.

        `last` has the bytes of the vector that the round before sent: its movement and the mean of its
        statistics. None: there was none, and the optimizer stays as it is.
        """
        if last is None:
            return
        groups = _groups_of(optimizer, rates)
        movements = self.vectors.entries_in(last, self.vectors.trained)
        for (parameter, statistics), movement in zip(self._of(parameters, last), movements, strict=True):
            found = groups.get(parameter)
            if found is None:
                continue  # the job does not give it to the optimizer
            group, rate = found
            # The parameters went down, so the movement has the sign opposite to the momentum's.
            step = movement.to(parameter.dtype).div(-rate) if rate else torch.zeros_like(parameter)
            state = self._state(group, parameter, statistics, step, rates.step)
            if state:
                optimizer.state[parameter] = state

    def _state(
        self, group: dict[str, Any], parameter: Tensor, statistics: list[Tensor], step: Tensor, count: int
    ) -> dict[str, Any]:
        """The state of one parameter; empty: it stays as it is. `step`: its mean step, per unit of rate."""
        if self._kind == MOVEMENT:
            return {"momentum_buffer": step} if group["momentum"] else {}
        if not statistics or not any(bool(each.any()) for each in statistics):
            return {}  # no batch has given it a gradient
        counter = torch.tensor(float(count), dtype=torch.float32)
        if self._kind == MEAN:
            kept = [each.to(parameter.dtype, copy=True) for each in statistics]
            return {_STEP: counter, **dict(zip(self._names, kept, strict=True))}
        second = _expanded(statistics, parameter)
        beta1, beta2 = group["betas"]
        # Adam divides both moments by these before it uses them.
        first = second.div(1 - beta2**count).sqrt_().add_(group["eps"]).mul_(step)
        first.mul_(ADAM_MOMENTUM * (1 - beta1**count))
        return {_STEP: counter, "exp_avg": first, "exp_avg_sq": second}


def _groups_of(optimizer: Optimizer, rates: StepRates) -> dict[Tensor, tuple[dict[str, Any], float]]:
    """The group of each parameter, and the sum of the rates with which it moved in the round before."""
    return {
        parameter: (group, rate)
        for group, rate in zip(optimizer.param_groups, rates.sums_before, strict=True)
        for parameter in group["params"]
    }


def _decays(optimizer: Optimizer) -> dict[Tensor, float]:
    """The factor by which each step of Adam shrinks the second moments of a parameter."""
    return {parameter: group["betas"][1] for group in optimizer.param_groups for parameter in group["params"]}


def _power(base: float, exponent: int) -> float:
    """A power by multiplications alone, which have the same bits on all machines; `**` need not have."""
    return math.prod(itertools.repeat(base, exponent))


def _factors(second: Tensor | None, like: list[Tensor]) -> list[Tensor]:
    """The means of rows and columns, or all second moments of a small parameter; zeros if it has none."""
    if second is None:
        return [torch.zeros_like(each) for each in like]
    if len(like) == 1:
        return [second.to(like[0].dtype)]
    matrix = second.reshape(second.shape[0], -1)
    return [matrix.mean(1).to(like[0].dtype), matrix.mean(0).to(like[1].dtype)]


def _is_factored(shape: Sequence[int]) -> bool:
    """Whether rows and columns of a parameter are fewer numbers than the parameter has."""
    return len(shape) > 1 and shape[0] + math.prod(shape[1:]) < math.prod(shape)


def _expanded(statistics: list[Tensor], parameter: Tensor) -> Tensor:
    """Second moments for a whole parameter, from the means of its rows and columns."""
    if len(statistics) == 1:
        return statistics[0].to(parameter.dtype, copy=True)
    rows, columns = statistics
    mean = rows.mean()
    # Both are zero together, as means of the same numbers.
    scaled = columns / mean if mean > 0 else torch.zeros_like(columns)
    return torch.outer(rows, scaled).to(parameter.dtype).view(parameter.shape)
