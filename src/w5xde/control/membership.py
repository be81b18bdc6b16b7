"""Membership: nodes join, leave, fall silent and are evicted. Knows no sockets and no clock."""

from __future__ import annotations

from w5xde.control import events as ev
from w5xde.control.run_state import RunState

# Fine enough to overtake a late batch soon, coarse enough to cost nothing.
TICK_SECONDS = 0.1
# For so long the pool must have more nodes than a step has batches before the user is told: nodes that are
# started together have then joined, and are counted.
OUTGROWN_SECONDS = 3.0


class Membership:
    """Decides who is a member, and gives back the leases of those who are not any more."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        # Since when the pool has more nodes than a step has batches; None: it has not. Told once.
        self._outgrown_at: float | None = None
        self._is_told = False

    def joined(self, event: ev.Joined, now: float) -> list[ev.Effect]:
        state = self._state
        member = state.members.join(event.node, now, event.machine, event.slots, event.guess_seconds)
        state.verification.joined(event.node)
        return [ev.Note("joined", f"{event.node} joined", {"node": event.node}), *state.lend([member], now)]

    def left(self, event: ev.Left, now: float) -> list[ev.Effect]:
        state = self._state
        if state.members.leave(event.node) is None:
            return []
        held = state.leases.of_node(event.node)
        for lease in held:
            state.leases.end(lease)
            state.give_back(lease)
        returned = sum(lease.batches for lease in held)
        text = f"{event.node} left ({event.reason})"
        if returned:
            text += f"; its {returned} batch{'es' * (returned > 1)} will be lent again"
        note = ev.Note("left", text, {"node": event.node, "reason": event.reason, "batches": returned})
        return [
            note,
            *([ev.Expire(event.node, [lease.id for lease in held], event.reason)] if held else []),
            *state.lend(state.members, now),
            *state.finish_if_settled(),
        ]

    def evict(self, node: str, reason: str, now: float, *, bans: bool = True) -> list[ev.Effect]:
        """Close the connection of a node, if it is a member, and ban it unless it was only unlucky."""
        effects: list[ev.Effect] = [ev.Ban(node, reason)] if bans else []
        if node in self._state.members:
            effects += [ev.Close(node, reason, for_good=True), *self.left(ev.Left(node, reason), now)]
        return effects

    def close_silent(self, event: ev.Ticked, now: float) -> list[ev.Effect]:
        """Note which nodes were heard, and close those that were silent for too long.

        Nodes are not blamed for time in which the coordinator itself stood still.
        """
        effects: list[ev.Effect] = []
        members = self._state.members
        for name, heard_at in event.heard.items():
            members.heard(name, heard_at)
        stall = members.forgive_stall(now, TICK_SECONDS)
        if stall:
            text = f"the coordinator stood still for {stall:.1f} s"
            effects.append(ev.Note("stalled", text, {"seconds": stall}))
        for member in members.silent(now):
            reason = f"silent for {now - member.heard_at:.1f} s"
            effects.append(ev.Close(member.name, reason, for_good=False))
            effects += self.left(ev.Left(member.name, reason), now)
        return effects

    def note_outgrown(self, now: float) -> list[ev.Effect]:
        """Say once that steps have too few batches for all nodes, and which setting would use them."""
        nodes, batches = len(self._state.members), self._state.plan.step_batches
        if self._is_told or self._state.settings.mode == "async" or nodes <= batches:
            self._outgrown_at = None
            return []
        if self._outgrown_at is None:
            self._outgrown_at = now
        if now - self._outgrown_at < OUTGROWN_SECONDS:
            return []
        self._is_told = True
        text = outgrown_text(nodes, batches, self._state.members.parallel)
        return [ev.Note("idle nodes", text, {"nodes": nodes, "batches": batches})]


def outgrown_text(nodes: int, batches: int, parallel: int) -> str:
    """A sentence about more nodes than batches in a step; `parallel` nodes can compute at a time."""
    at_once = f", of which {parallel} can compute at once" if parallel < nodes else ""
    text = f"{nodes} nodes{at_once}, {batches} {'batches' if batches > 1 else 'batch'} a step: "
    if parallel <= batches:
        return f"{text}more batches a step would gain nothing"
    idle = parallel - batches
    have, them = ("node has", "it") if idle == 1 else ("nodes have", "them")
    threads = f", or --threads {parallel // batches} on fewer nodes" if parallel >= 2 * batches else ""
    return (
        f"{text}{idle} {have} nothing to do; a new run with --batches-per-step {parallel} would use {them}"
        f"{threads}"
    )
