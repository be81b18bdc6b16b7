"""Failures: what becomes of a batch that fails, and of a node on which too much does.

A batch is tried again, elsewhere if there is an elsewhere; one that fails everywhere is set aside. A node is
turned out if leases in a row fail there while others manage, or if updates of it were bad and others computed
the same batches well. Only decides: knows no tensors, no sockets and no clock.
"""

from __future__ import annotations

from w5xde.control import events as ev
from w5xde.control.modes.sync import Mode
from w5xde.control.pool.members import Member, Members
from w5xde.control.steps.cut import Aside
from w5xde.control.steps.leases import Lease, Leases
from w5xde.control.steps.open_step import Share, StepWork
from w5xde.control.steps.tally import Tally
from w5xde.control.trust.norm_limits import FAULTS_MAX, Judge

# A node on which this many leases in a row fail, while others manage, is broken.
FAILURES_IN_A_ROW_MAX = 5
# If this many batches are set aside and none succeeds in between, it is not the batches.
ASIDE_IN_A_ROW_MAX = 20


class Failures:
    """Everything that went wrong with batches, and on whom."""

    def __init__(self, mode: Mode, members: Members, leases: Leases, tally: Tally, judge: Judge) -> None:
        self._mode = mode
        self._members = members
        self._leases = leases
        self._tally = tally
        self._judge = judge
        self._aside_in_a_row = 0

    def none(self, member: Member | None) -> None:
        """An answer was good."""
        self._aside_in_a_row = 0
        if member is not None:
            member.failures_in_a_row = 0

    def failed(
        self, lease: Lease, reason: str, norm: float | None
    ) -> tuple[list[ev.Effect], StepWork | None]:
        """A lease failed: what to say, and the step's work if its batch is beyond hope.

        `norm`: it was we who refused what came; None: the node itself says that it could not compute it.
        """
        work = self._mode.give_back(lease, failed=True)
        if norm is None:
            text = f"{lease.node} could not compute {lease.where}: {reason}"
        else:
            text = f"what {lease.node} gave for {lease.where} is refused: {reason}"
            if work is not None:
                work.doubt(lease.span, lease.node)
                self._judge.refused(lease, norm)
        effects: list[ev.Effect] = [
            ev.Reject(lease.node, lease.id, reason),
            ev.Note("failed" if norm is None else "doubt", text, {"node": lease.node}),
        ]
        others = self._leases.of_step(lease.step.index)
        is_hopeless = work is not None and work.is_hopeless(lease.span, self._members, others)
        is_unsure = self._judge.needs_another(lease, is_alone=len(self._members) == 1)
        return effects, work if is_hopeless and not is_unsure else None

    def is_broken(self, member: Member) -> str:
        """One more lease failed there: why the node is to be turned out, or nothing."""
        member.failures_in_a_row += 1
        if member.failures_in_a_row >= FAILURES_IN_A_ROW_MAX and len(self._members) > 1:
            return f"{member.failures_in_a_row} leases in a row failed there"
        return ""

    def set_aside(self, work: StepWork, lease: Lease, reason: str) -> list[ev.Effect]:
        """Nobody can compute this batch: go on without it, and say so."""
        step, where = lease.step, lease.where
        self._aside_in_a_row += 1
        if self._aside_in_a_row >= ASIDE_IN_A_ROW_MAX:
            what = f"{where} fails wherever it is tried, like {ASIDE_IN_A_ROW_MAX - 1} before it"
            return [ev.Finish("", error=f"{what}: {reason}")]
        tried = work.failures[lease.span]
        nodes = sorted(set(tried))
        self._tally.accounts.aside += [
            Aside(step.epoch, step.first + i, step.sizes[i], reason, tuple(nodes))
            for i in range(lease.span.start, lease.span.stop)
        ]
        for node in nodes:
            # It was the data, not they.
            member = self._members.get(node)
            if member is not None:
                member.failures_in_a_row = max(0, member.failures_in_a_row - tried.count(node))
        return [
            ev.SetAside(step, lease.span, reason, nodes),
            ev.Note(
                "bad batch",
                f"{where} is set aside: it fails wherever it is tried ({reason})",
                {"nodes": nodes},
            ),
        ]

    def blame(self, step: int, shares: list[Share]) -> tuple[list[ev.Effect], dict[str, str]]:
        """The step is complete: whose refused updates were their own fault, and who is to go for that."""
        effects: list[ev.Effect] = []
        out: dict[str, str] = {}
        for fault in self._judge.close(step, shares):
            text = f"others computed {fault.where} well: it was {fault.node}'s fault"
            facts = {"node": fault.node, "faults": fault.count}
            effects.append(ev.Note("fault", f"{text} ({fault.count} of {FAULTS_MAX})", facts))
            if fault.count >= FAULTS_MAX:
                out[fault.node] = f"{fault.count} of its updates were bad, and others computed them well"
        return effects, out
