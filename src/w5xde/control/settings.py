"""What the core must know of a run's settings: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from w5xde.control.trust.norm_limits import OFF
from w5xde.robust_rule import Robust


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What the core must know of the run's settings."""

    mode: str
    staleness: int | None = None
    seconds: float | None = None
    evaluate_every: int | None = None
    evaluates: bool = False
    incarnation: int = 1
    skip_bad_batches: bool = False
    save_seconds: float | None = None
    save_steps: int | None = None
    logs_steps: bool = False
    max_update_norm: str = OFF
    # The norm of the gradient that the coordinator computed itself; 0: not known.
    own_norm: float = 0.0
    # Whether an update takes long to travel: then a node holds only what it computes.
    is_large: bool = False
    # Whether steps of one batch each may be lent as one lease.
    stretches: bool = False
    # The share of leases that is verified.
    verify: float = 0.0
    # How much of a step's extremes is left out, and so how many nodes must take part in it.
    robust: Robust | None = None
