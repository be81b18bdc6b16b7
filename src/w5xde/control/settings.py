"""The settings of a run that the core needs, as plain data. Knows no files, flags or environment."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde.control.steps.evaluation_schedule import WAIT
from w5xde.control.trust.norm_limits import OFF
from w5xde.specs.robust_rule import Robust


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The settings that the core needs."""

    mode: str
    staleness: int | None = None
    seconds: float | None = None
    evaluate_every: int | None = None
    evaluates: bool = False
    # What happens to an evaluation that is due while another one is under way: see `EvaluationSchedule`.
    evaluation_policy: str = WAIT
    # The number of samples in each batch of a validation set that nodes measure; none: they do not.
    validation_sizes: tuple[int, ...] = ()
    incarnation: int = 1
    skip_bad_batches: bool = False
    # In a pool: a step is made of all its batches or not at all. If a batch fails everywhere, its step is set
    # aside, and the run goes on.
    all_or_nothing: bool = False
    save_seconds: float | None = None
    save_steps: int | None = None
    logs_steps: bool = False
    max_update_norm: str = OFF
    # The norm of a first gradient that the coordinator computed itself; 0 if unknown.
    own_norm: float = 0.0
    # Whether an update takes long to travel: then a node holds only the lease that it computes.
    is_large: bool = False
    # Async mode: whether late updates make smaller steps, whether parameters look ahead of their version,
    # whether nodes may make steps of their own. The norm of such a step that the coordinator made itself; 0
    # if unknown.
    delay_correction: bool = False
    looks_ahead: bool = False
    stretches: bool = False
    own_step_norm: float = 0.0
    # The share of leases whose answers are verified, 0 to 1.
    verify: float = 0.0
    # How many extreme values the robust mean leaves out, and so how many nodes a step needs.
    robust: Robust | None = None
    # In rounds mode: how far rounds grow is chosen by the first of them.
    chooses_rounds: bool = False
