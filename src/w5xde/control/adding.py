"""Adding: which answers may be added to what is there of their step while they still arrive.

An answer's neighbour in the tree is what it will be added to. If that is there, the answer needs no memory of
its own; but what is half added cannot be taken out again, so this is only for answers that nothing is known
against, and if one fails halfway its step begins anew. Only decides: knows no tensors, sockets or clock.
"""

from __future__ import annotations

from w5xde.control.modes.sync import Mode
from w5xde.control.settings import CoreSettings
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.trust.norm_limits import NormCheck
from w5xde.control.trust.verification import Verification
from w5xde.tree import Span, sibling


class Adding:
    """Says what becomes of an answer that begins to arrive."""

    def __init__(
        self,
        settings: CoreSettings,
        mode: Mode,
        leases: Leases,
        verification: Verification,
        norm_check: NormCheck,
    ) -> None:
        # In async mode buffers of older versions are weighted when they are added; with --robust nothing is.
        self._is_on = settings.mode == "sync" and settings.robust is None
        self._mode = mode
        self._leases = leases
        self._verification = verification
        self._norm_check = norm_check

    def wanted(self, number: int, node: str) -> Lease | None:
        """The lease, if an answer of this node to it would count now."""
        lease = self._leases.get(number)
        if lease is None or lease.node != node or self._mode.admit(lease, lease.version):
            return None
        return lease

    def is_needless(self, number: int, node: str) -> bool:
        """Whether an answer of this node to this lease cannot count, and nobody waits to compare it."""
        return self.wanted(number, node) is None and not self._verification.holds_back(number)

    def neighbour_of(self, lease: Lease, version: int) -> Span | None:
        """What its answer will be added to, if that is there and the answer need not be seen alone."""
        step = lease.step
        work = next((work for work in self._mode.open_works if work.plan.index == step.index), None)
        if not self._is_on or work is None or step.count == 1 or lease.version != version:
            return None
        # What failed once may be set aside, and what was doubted or spoilt once may be so again.
        if work.failures or work.was_spoilt or step.index in self._norm_check.doubted_steps:
            return None
        # Its own answer, or another for the same batches, may be found right or wrong at any moment.
        if any(
            self._verification.holds_back(each.id)
            for each in self._leases.of_step(step.index)
            if each.span.meets(lease.span)
        ):
            return None
        above = sibling(lease.span, step.count)
        # What was set aside is there too, with nothing in it.
        return above[1] if above is not None and work.tree.get(above[1]) else None
