"""The lending desk: turns leases into messages, with their batches and the parameters they need.

A lease waits here until its batches are read; parameters are sent once for each version and node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from w5xde.control.steps.leases import Lease, Leases
from w5xde.learn.data.payload import Packed
from w5xde.messages import Batch, Cancel, Loan, Params, Work
from w5xde.runtime.coordinator.loader import Loader
from w5xde.runtime.coordinator.parameters import Snapshot, Snapshots
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.coordinator.peers import Reception
from w5xde.runtime.coordinator.recheck import Recheck
from w5xde.runtime.system.actor import Actor
from w5xde.runtime.telemetry.meters import Meters

Batches = dict[tuple[int, int], Packed]


class LendingDesk:
    """Sends work to nodes. `dropped(node, lease)` tells of what could not be, or need not be, sent."""

    def __init__(
        self,
        reception: Reception,
        loader: Loader,
        snapshots: Snapshots,
        actor: Actor,
        leases: Leases,
        meters: Meters,
        dropped: Callable[[str, int], None],
        recheck: Recheck,
    ) -> None:
        self._reception = reception
        self._loader = loader
        self._actor = actor
        self._meters = meters
        self._leases = leases
        self._dropped = dropped
        self._recheck = recheck
        self._to_verify: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._snapshots = snapshots

    def lend(self, node: str, leases: list[Lease], verify: list[int]) -> None:
        """Send these leases together, as soon as their batches are there; some are to be verified."""
        self._to_verify.update(verify)
        peer = self._reception.get(node)
        if peer is None:
            for lease in leases:
                self._dropped(node, lease.id)
            return
        keys = [key for lease in leases for key in lease.step.keys[lease.span.start : lease.span.stop]]
        found: Batches = self._loader.at_once(keys) or {}
        if found:
            self._send_params(peer, leases, found)
            return

        def arrived(key: tuple[int, int], packed: Packed) -> None:
            found[key] = packed
            if len(found) == len(keys):
                self._send_params(peer, leases, found)

        for key in keys:
            self._loader.get(key, lambda packed, key=key: arrived(key, packed))  # type: ignore[misc]

    def rewind(self) -> None:
        """Versions that were to come will be others: what is on its way to nodes is what they have."""
        for peer in self._reception:
            peer.version_asked = peer.version

    def cancel(self, node: str, leases: list[int]) -> None:
        peer = self._reception.get(node)
        if peer is not None:
            peer.connection.send(Cancel(leases))

    def _send_params(self, peer: Peer, leases: list[Lease], found: Batches) -> None:
        is_chosen = not self._to_verify.isdisjoint(lease.id for lease in leases)
        if peer.version_asked >= leases[0].version and not is_chosen:
            # Even then the work waits its turn, so that it never overtakes its parameters.
            self._actor.call(lambda: None, lambda _: self._send_work(peer, leases, found))
            return
        whole = peer.version_asked < 0
        peer.version_asked = max(peer.version_asked, leases[0].version)

        def make() -> tuple[Snapshot, memoryview | None]:
            # An answer is verified on the very parameters that the node has.
            kept = self._snapshots.whole_copy() if is_chosen else None
            return self._snapshots.get(peer, whole=whole), kept

        def send(made: tuple[Snapshot, memoryview | None]) -> None:
            params, kept = made
            if peer.version != params.version:
                peer.version = params.version
                peer.version_asked = max(peer.version_asked, peer.version)
                self._meters.node(peer.name).moved_vectors(params.raw_bytes, params.encoded_bytes)
                message = Params(peer.version, whole, params.codec)
                peer.connection.send(message, params.pieces, params.sent, hold=True)
            elif params.sent is not None:
                params.sent()
            if kept is not None:
                self._recheck.keep(params.version, kept)
            self._send_work(peer, leases, found)

        self._actor.call(make, send)

    def _send_work(self, peer: Peer, leases: list[Lease], found: Batches) -> None:
        # Reading the batches may have taken time: what nobody needs any more is not sent.
        wanted = [lease for lease in leases if self._leases.holds(lease.id)]
        if wanted and not peer.is_gone:
            self._send_wanted(peer, wanted, found)
        self._to_verify.difference_update(lease.id for lease in leases)
        # Last: the core may lend at once, and other parameters must not come between these and their work.
        for lease in leases:
            if lease not in wanted:
                self._dropped(peer.name, lease.id)

    def _send_wanted(self, peer: Peer, wanted: list[Lease], found: Batches) -> None:
        pieces: list[memoryview] = []
        loans = []
        at = 0
        for lease in wanted:
            step, (start, stop) = lease.step, lease.span
            batches = []
            for position in range(start, stop):
                packed = found[step.epoch, step.first + position]
                batches.append(Batch(step.first + position, packed.samples, at, packed.item))
                pieces += packed.pieces
                at += packed.body_bytes
            if lease.id in self._to_verify:
                self._recheck.sent(peer.version, lease, [found[key] for key in step.keys[start:stop]])
            place = (step.epoch, start, stop, step.count, step.samples)
            loans.append(Loan(lease.id, *place, batches, step.apart))
        batch_count = sum([lease.span.count for lease in wanted])
        apart = {lease.id: lease.span.count if lease.step.apart else 0 for lease in wanted}
        self._reception.allow_vectors(peer, sum([max(1, count) for count in apart.values()]))
        peer.works.append((apart, batch_count, self._loop.time()))
        peer.connection.send(Work(peer.version, loans, peer.connection.link), pieces)
