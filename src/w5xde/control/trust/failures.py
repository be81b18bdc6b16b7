"""Failures: when a failed batch is retried or set aside, and when a node is evicted for its failures.

A batch is retried, on another node if there is one; a batch that fails everywhere is set aside. A node is
evicted if many leases in a row fail there, or if its updates were rejected and others computed the same
batches correctly. Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from w5xde.control import events as ev
from w5xde.control.modes.base import Mode
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.cut import Aside
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import OpenStep, Share
from w5xde.control.steps.tally import Tally
from w5xde.control.trust.norm_limits import FAULTS_MAX, NormCheck
from w5xde.tree import Span

# The kind of the note that an update needs a second opinion: in the ledger, and hardly ever of interest.
SECOND_OPINION = "second opinion"
# A node on which this many leases in a row fail, while there are other nodes, is broken.
FAILURES_IN_A_ROW_MAX = 5
# If this many batches in a row are set aside and none succeeds in between, the job is broken.
ASIDE_IN_A_ROW_MAX = 20


class Failures:
    """Counts failures of batches and of nodes."""

    def __init__(
        self, mode: Mode, members: Members, leases: Leases, tally: Tally, norm_check: NormCheck
    ) -> None:
        self._mode = mode
        self._members = members
        self._leases = leases
        self._tally = tally
        self._norm_check = norm_check
        self._aside_in_a_row = 0

    def succeeded(self, member: Member | None) -> None:
        """Count a good answer: failures are no longer in a row."""
        self._aside_in_a_row = 0
        if member is not None:
            member.failures_in_a_row = 0

    def failed(
        self, lease: Lease, reason: str, norm: float | None
    ) -> tuple[list[ev.Effect], OpenStep | None]:
        """A lease failed: return the effects, and the open step if its batch must be set aside.

        `norm` is that of an update that we rejected; None if the node itself could not compute it.
        """
        open_step = self._mode.give_back(lease, failed=True)
        if norm is None:
            kind, text = "failed", f"{lease.node} could not compute {lease.where}: {reason}"
        else:
            kind, text = "doubt", f"what {lease.node} gave for {lease.where} is refused: {reason}"
            if open_step is not None:
                open_step.doubt(lease.span, lease.node)
                self._norm_check.reject(lease, norm)
        others = self._leases.of_step(lease.step.index)
        must_set_aside = open_step is not None and open_step.must_set_aside(lease.span, self._members, others)
        is_alone = self._members.is_alone(lease.step.leaf_batches)
        if self._norm_check.needs_second_node(lease, is_alone=is_alone):
            must_set_aside = False
        if norm is not None and not must_set_aside and self._norm_check.is_doubted(lease):
            # An honest update may be unusual: only a second opinion that differs says something of its node.
            kind = SECOND_OPINION
            text = f"what {lease.node} gave for {lease.where} is computed again to be sure: {reason}"
        effects: list[ev.Effect] = [
            ev.Reject(lease.node, lease.id, reason),
            ev.Note(kind, text, {"node": lease.node}),
        ]
        return effects, open_step if must_set_aside else None

    def is_broken(self, member: Member) -> str:
        """Count a failed lease of the node; return why the node must be evicted, or an empty string."""
        member.failures_in_a_row += 1
        if member.failures_in_a_row >= FAILURES_IN_A_ROW_MAX and len(self._members) > 1:
            return f"{member.failures_in_a_row} leases in a row failed there"
        return ""

    def set_aside(self, open_step: OpenStep, lease: Lease, reason: str) -> list[ev.Effect]:
        """Continue without a batch that no node can compute."""
        step, where = lease.step, lease.where
        self._aside_in_a_row += 1
        if self._aside_in_a_row >= ASIDE_IN_A_ROW_MAX:
            what = f"{where} fails wherever it is tried, like {ASIDE_IN_A_ROW_MAX - 1} before it"
            return [ev.Finish("", error=f"{what}: {reason}")]
        nodes = self.forgive(open_step, lease.span)
        self._tally.accounts.aside += [
            Aside(step.epoch, step.first + i, step.sizes[i], reason, tuple(nodes))
            for i in step.places(lease.span)
        ]
        return [
            ev.SetAside(step, lease.span, reason, nodes),
            ev.Note(
                "bad batch",
                f"{where} is set aside: it fails wherever it is tried ({reason})",
                {"nodes": nodes},
            ),
        ]

    def forgive(self, open_step: OpenStep, span: Span) -> list[str]:
        """The data was at fault, not the nodes on which the span failed: return these."""
        tried = open_step.failures.get(span, [])
        for node in set(tried):
            member = self._members.get(node)
            if member is not None:
                member.failures_in_a_row = max(0, member.failures_in_a_row - tried.count(node))
        return sorted(set(tried))

    def blame(self, step: int, shares: list[Share]) -> tuple[list[ev.Effect], dict[str, str]]:
        """The step is complete: report rejected updates that a second opinion contradicts.

        Returns the effects, and the nodes to evict for that with the reason.
        """
        effects: list[ev.Effect] = []
        evicted: dict[str, str] = {}
        for update, count in self._norm_check.complete(step, shares):
            if not count:
                text = f"what {update.node} gave for {update.where} first was wrong, and did not count"
                effects.append(ev.Note("doubt", text, {"node": update.node}))
                continue
            text = f"others computed {update.where} well: it was {update.node}'s fault"
            facts = {"node": update.node, "faults": count}
            effects.append(ev.Note("fault", f"{text} ({count} of {FAULTS_MAX})", facts))
            if count >= FAULTS_MAX:
                evicted[update.node] = f"{count} of its updates were bad, and others computed them well"
        return effects, evicted
