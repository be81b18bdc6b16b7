"""The rule of robust means: how many nodes of a step are left out at each end, and how many it needs.

`trim:B` leaves out the B largest and the B smallest; `median` leaves out as many as it can. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, NamedTuple

from msgspec import Meta

from w5xde.specs.setting_error import SettingError

OFF = "off"
MEDIAN = "median"
# Half of the most nodes that a run can have.
TRIM_MAX = 499
_SPEC = re.compile(r"trim:([1-9]\d{0,2})")
# The setting; `require_robust` checks it.
RobustSetting = Annotated[
    str,
    Meta(
        description="sync: leave out extreme gradients: trim:B (of each number the B largest and the B"
        " smallest, with 2B+1 nodes or more), median, off. The bits then depend on which nodes helped"
    ),
]


class Robust(NamedTuple):
    """At every coordinate `trim` nodes are left out at each end; None: all but the middle one or two."""

    trim: int | None

    @property
    def needs(self) -> int:
        """The number of nodes that a step needs for the promise to hold."""
        return 3 if self.trim is None else 2 * self.trim + 1

    def left_out(self, nodes: int) -> int:
        """The number left out at each end of `nodes` nodes: at least one node remains."""
        most = (nodes - 1) // 2
        return most if self.trim is None else min(self.trim, most)


def parse_robust(text: str) -> Robust | None:
    """The rule for `off` (None), `median` or `trim:B`; ValueError for any other text."""
    if text == OFF:
        return None
    if text == MEDIAN:
        return Robust(None)
    found = _SPEC.fullmatch(text)
    if found is None or int(found[1]) > TRIM_MAX:
        raise ValueError(f"robust {text!r} must be off, median or trim:B with B from 1 to {TRIM_MAX}")
    return Robust(int(found[1]))


def require_robust(setting: str, mode: str, step_batches: Callable[[], int]) -> None:
    """Refuse a rule that this mode cannot follow, or for which its steps have too few batches; ValueError."""
    rule = parse_robust(setting)
    if rule is None:
        return
    if mode == "async":
        raise SettingError(
            f"robust {setting} compares the gradients of several nodes for one step, and in mode"
            " async each step has one node",
            fix="use mode sync, or robust off and verify 0.1",
        )
    if step_batches() < rule.needs:
        raise SettingError(
            f"robust {setting} takes {rule.needs} nodes in a step, and batches-per-step"
            f" {step_batches()} is too few for them",
            fix=f"make it {rule.needs} or more",
        )
