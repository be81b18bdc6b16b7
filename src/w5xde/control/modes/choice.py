"""Which mode a run uses. Knows the settings of the core, and nothing of how a mode works."""

from __future__ import annotations

from w5xde.control.modes.async_mode import AsyncMode
from w5xde.control.modes.base import Mode
from w5xde.control.modes.delay import DelayCorrection
from w5xde.control.modes.robust_mode import RobustMode
from w5xde.control.modes.sync import SyncMode
from w5xde.control.pool.members import Members
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Leases
from w5xde.control.steps.plan import Plan


def choose_mode(settings: CoreSettings, plan: Plan, members: Members, leases: Leases) -> Mode:
    """Build the mode that these settings ask for."""
    if settings.mode == "async":
        return AsyncMode(
            plan,
            members,
            leases,
            settings.staleness,
            DelayCorrection(scales_rates=settings.delay_correction, looks_ahead=settings.looks_ahead),
            stretches=settings.stretches,
        )
    # Rounds are lent as steps are: the plan says which of the two it makes.
    if settings.robust is not None:
        return RobustMode(plan, members, leases, settings.robust)
    return SyncMode(plan, members, leases, is_large=settings.is_large)
