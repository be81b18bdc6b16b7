"""Lending: sends leases to nodes, with their batches and the parameters they need.

A lease waits here until its batches are read; the same parameters are sent to a node once. Decides
nothing: the core says which lease goes to which node.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.control.view import CoreView
from w5xde.learn.data.payload import Packed
from w5xde.learn.data.sources import Key
from w5xde.messages import Batch, Cancel, Loan, Params, SampleList, Work
from w5xde.runtime.pipeline.peer import Peer, SentParams, SentWork
from w5xde.runtime.pipeline.ports import Ports, Snapshot
from w5xde.runtime.telemetry.meters import Meters

PackedBatches = dict[Key, Packed]


class Lending:
    """Sends work. The core hears `Dropped` of a lease that could not be, or need not be, sent."""

    def __init__(
        self, ports: Ports, view: CoreView, meters: Meters, dispatch: Callable[[ev.Event], None]
    ) -> None:
        self._ports = ports
        self._view = view
        self._meters = meters
        self._dispatch = dispatch
        self._to_verify: set[int] = set()

    def lend(self, effect: ev.Assign) -> None:
        """Send these leases together, as soon as their batches are there."""
        leases, peer = effect.leases, self._ports.peers.get(effect.node)
        if peer is None:
            for lease in leases:
                self._dispatch(ev.Dropped(effect.node, lease.id))
            return
        self._to_verify.update(effect.verify)
        keys = self._keys_to_read(peer, leases)
        found: PackedBatches = self._ports.batches.at_once(keys) or {}
        if len(found) == len(keys):
            self._send_parameters(peer, leases, found)
            return

        def arrived(key: Key, packed: Packed) -> None:
            found[key] = packed
            if len(found) == len(keys):
                self._send_parameters(peer, leases, found)

        for key in keys:
            self._ports.batches.get(key, lambda packed, key=key: arrived(key, packed))  # type: ignore[misc]

    def _keys_to_read(self, peer: Peer, leases: list[Lease]) -> list[Key]:
        """The batches of these leases, without those whose samples the peer is known to keep."""
        samples = self._ports.samples
        return [
            key
            for lease in leases
            for key in lease.step.keys[lease.span.start : lease.span.stop]
            if samples is None or lease.id in self._to_verify or samples.needs_reading(peer, key)
        ]

    def cancel(self, effect: ev.CancelLeases) -> None:
        peer = self._ports.peers.get(effect.node)
        if peer is not None:
            peer.connection.send(Cancel(effect.leases))

    def rewind(self) -> None:
        """A step was rolled back: every node is sent the parameters again with its next lease.

        Versions that were asked for and not sent will never exist, and a local node may have copied shared
        memory while the step was in it.
        """
        before = SentParams(self._view.version - 1)
        for peer in self._ports.peers:
            peer.params = peer.params_asked = min(peer.params, before)

    def _send_parameters(self, peer: Peer, leases: list[Lease], found: PackedBatches) -> None:
        tasks, parameters = self._ports.tasks, self._ports.model.parameters
        is_chosen = not self._to_verify.isdisjoint(lease.id for lease in leases)
        # While the batches were read, the step that was to make the version may have been rolled back.
        version, ahead = min(leases[0].version, self._view.version), leases[0].ahead
        asked = peer.params_asked
        if asked.version >= version and asked.ahead == ahead and not is_chosen:
            # The work waits its turn all the same, so that it never overtakes its parameters.
            tasks.call(lambda: None, lambda _: self._send_work(peer, leases, found))
            return
        whole = asked.version < 0
        peer.params_asked = SentParams(max(asked.version, version), ahead)

        def make() -> tuple[Snapshot, memoryview | None]:
            # An answer is verified on the very parameters that the node has.
            kept = parameters.whole_copy(ahead) if is_chosen else None
            return parameters.get(peer, whole=whole, ahead=ahead), kept

        def send(made: tuple[Snapshot, memoryview | None]) -> None:
            snapshot, kept = made
            params = SentParams(snapshot.version, ahead)
            if peer.params != params:
                peer.params = params
                if params.version > peer.params_asked.version:
                    peer.params_asked = params
                self._meters.node(peer.name).moved_vectors(snapshot.raw_bytes, snapshot.encoded_bytes)
                message = Params(params.version, whole, snapshot.codec)
                peer.connection.send(message, snapshot.pieces, snapshot.sent, hold=True)
            elif snapshot.sent is not None:
                snapshot.sent()
            if kept is not None:
                self._ports.verifier.keep(params, kept)
            self._send_work(peer, leases, found)

        tasks.call(make, send)

    def _send_work(self, peer: Peer, leases: list[Lease], found: PackedBatches) -> None:
        # Reading the batches may have taken time: a lease that ended meanwhile is not sent.
        wanted = [lease for lease in leases if self._view.lease(lease.id) is not None]
        if wanted and not peer.is_gone:
            self._send_wanted(peer, wanted, found)
        self._to_verify.difference_update(lease.id for lease in leases)
        # Last: the core may lend at once, and other parameters must not come between these and their work.
        for lease in leases:
            if lease not in wanted:
                self._dispatch(ev.Dropped(peer.name, lease.id))

    def _send_wanted(self, peer: Peer, wanted: list[Lease], found: PackedBatches) -> None:
        samples = self._ports.samples if peer.samples is not None else None
        pieces: list[memoryview] = []
        loans = []
        listed: dict[int, list[tuple[int, SampleList | None]]] = {}
        at = 0
        for lease in wanted:
            step, (start, stop) = lease.step, lease.span
            batches = []
            for position in range(start, stop):
                key = (step.epoch, step.first + position)
                packed = samples.as_sent(peer, key, found.get(key)) if samples is not None else found[key]
                batches.append(Batch(key[1], packed.samples, at, packed.item, packed.listed))
                pieces += packed.pieces
                at += packed.body_bytes
            if lease.id in self._to_verify:
                self._ports.verifier.sent(peer.params, lease, [found[key] for key in step.keys[start:stop]])
            place = (step.epoch, start, stop, step.count, step.samples)
            loans.append(Loan(lease.id, *place, batches, step.apart))
            if samples is not None:
                listed[lease.id] = [(batch.samples, batch.listed) for batch in batches]
        batch_count = sum([lease.span.count for lease in wanted])
        self._ports.peers.allow_vectors(peer, len(wanted))
        leases = [lease.id for lease in wanted]
        peer.works.append(SentWork(leases, batch_count, self._ports.clock(), listed))
        measures = any(self._meters.noise.wants(lease.step) for lease in wanted)
        before = peer.connection.bytes_sent
        peer.connection.send(
            Work(peer.params.version, loans, peer.connection.reported_link, measures), pieces
        )
        self._meters.sent_data(loans[0].epoch, peer.connection.bytes_sent - before)
