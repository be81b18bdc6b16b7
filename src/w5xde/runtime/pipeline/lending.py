"""Lending: sends leases to nodes, with their batches and the parameters they need.

A lease waits here until its batches are read; the same parameters are sent to a node once. Decides
nothing: the core says which lease goes to which node.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.control.view import CoreView
from w5xde.learn.data.payload import Packed, ReadBatch, UnreadableBatch
from w5xde.learn.data.sources import Key
from w5xde.learn.rounds.replica import Replica
from w5xde.message_types import Call, SampleList, StepRates
from w5xde.messages import Batch, Cancel, Loan, Work
from w5xde.runtime.pipeline.peer import NOTHING_SENT, Peer, SentParams, SentWork
from w5xde.runtime.pipeline.ports import Batches, ParameterFrame, Ports, SentLease, Snapshot
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
        batches = self._batches_of(leases)
        at_once: PackedBatches = batches.at_once(keys) or {}
        if len(at_once) == len(keys):
            self._send_parameters(peer, leases, at_once)
            return
        found: dict[Key, ReadBatch] = {}

        def arrived(key: Key, read: ReadBatch) -> None:
            found[key] = read
            if len(found) == len(keys):
                self._send_readable(peer, leases, found)

        for key in keys:
            batches.get(key, lambda read, key=key: arrived(key, read))  # type: ignore[misc]

    def _batches_of(self, leases: list[Lease]) -> Batches:
        """What hands out the batches of leases that are sent together: of steps, or of a validation."""
        validation = self._ports.validation
        return validation.batches if validation is not None and _validates(leases) else self._ports.batches

    def _send_readable(self, peer: Peer, leases: list[Lease], found: dict[Key, ReadBatch]) -> None:
        """Send those of the leases whose batches could all be read; the core hears of the others."""
        packed = {key: read for key, read in found.items() if isinstance(read, Packed)}
        if len(packed) == len(found):
            self._send_parameters(peer, leases, packed)
            return
        bad = {key: read.reason for key, read in found.items() if isinstance(read, UnreadableBatch)}
        readable, unreadable = [], []
        for lease in leases:
            reasons = {key[1]: bad[key] for key in lease.step.keys_of(lease.span) if key in bad}
            if reasons:
                unreadable.append(ev.Unreadable(peer.name, lease.id, reasons))
            else:
                readable.append(lease)
        if readable:
            self._send_parameters(peer, readable, packed)
        # Last: the core may lend at once.
        self._to_verify.difference_update(event.lease for event in unreadable)
        for event in unreadable:
            self._dispatch(event)

    def _keys_to_read(self, peer: Peer, leases: list[Lease]) -> list[Key]:
        """The batches of these leases, without those whose samples the peer is known to keep."""
        samples = None if _validates(leases) else self._ports.samples
        return [
            key
            for lease in leases
            for key in lease.step.keys_of(lease.span)
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
            if self._view.plan.rounds is None:
                peer.params = min(peer.params, before)
            # In rounds mode nothing is shared, and a replica that a node has stays good.
            peer.params_asked = peer.params

    def _send_parameters(self, peer: Peer, leases: list[Lease], found: PackedBatches) -> None:
        tasks, parameters = self._ports.tasks, self._ports.model.parameters

        def rates_now() -> StepRates | None:
            return None if _validates(leases) else parameters.rates(leases[0].step.steps)

        is_chosen = not self._to_verify.isdisjoint(lease.id for lease in leases)
        # While the batches were read, the step that was to make the version may have been rolled back.
        version, ahead = min(leases[0].version, self._view.version), leases[0].ahead
        asked = peer.params_asked
        if asked.version >= version and asked.ahead == ahead and not is_chosen:

            def send_alone(rates: StepRates | None) -> None:
                if peer.params == NOTHING_SENT:
                    self._send_parameters(peer, leases, found)  # it has lost its parameters meanwhile
                else:
                    self._send_work(peer, leases, found, rates)

            # The work waits its turn all the same, so that it never overtakes its parameters.
            tasks.call(rates_now, send_alone)
            return
        whole = asked.version < 0
        peer.params_asked = SentParams(max(asked.version, version), ahead)

        def make() -> tuple[SentParams, Snapshot, Replica | None, StepRates | None]:
            # An answer is verified on the very parameters that the node has.
            kept = parameters.kept_copy(ahead) if is_chosen else None
            known, snapshot = peer.params, parameters.get(peer, whole=whole, ahead=ahead)
            return known, snapshot, kept, rates_now()

        def send(made: tuple[SentParams, Snapshot, Replica | None, StepRates | None]) -> None:
            known, snapshot, kept, rates = made
            if peer.params == NOTHING_SENT != known:
                # It has lost the parameters that these are to change.
                if snapshot.sent is not None:
                    snapshot.sent()
                self._send_parameters(peer, leases, found)
                return
            params = SentParams(snapshot.version, ahead)
            if peer.params != params:
                # Another snapshot may have been sent since this one was made.
                before = peer.params
                is_looking_ahead = ahead != before.ahead
                new = [f for f in snapshot.frames if f.message.version > before.version or is_looking_ahead]
                peer.params = params
                if params.version > peer.params_asked.version:
                    peer.params_asked = params
                self._send_frames(peer, new, snapshot)
            elif snapshot.sent is not None:
                snapshot.sent()
            if kept is not None:
                self._ports.verifier.keep(params, kept)
            self._send_work(peer, leases, found, rates)

        tasks.call(make, send)

    def _send_frames(self, peer: Peer, frames: list[ParameterFrame], snapshot: Snapshot) -> None:
        meter, last = self._meters.node(peer.name), len(frames) - 1
        if not frames and snapshot.sent is not None:
            snapshot.sent()
        for number, frame in enumerate(frames):
            meter.moved_vectors(snapshot.raw_bytes, frame.encoded_bytes)
            sent = snapshot.sent if number == last else None
            peer.connection.send(frame.message, frame.pieces, sent, hold=True)

    def _send_work(
        self, peer: Peer, leases: list[Lease], found: PackedBatches, rates: StepRates | None
    ) -> None:
        # Reading the batches may have taken time: a lease that ended meanwhile is not sent.
        wanted = [lease for lease in leases if self._view.lease(lease.id) is not None]
        if wanted and not peer.is_gone:
            self._send_wanted(peer, wanted, found, rates)
        self._to_verify.difference_update(lease.id for lease in leases)
        # Last: the core may lend at once, and other parameters must not come between these and their work.
        for lease in leases:
            if lease not in wanted:
                self._dispatch(ev.Dropped(peer.name, lease.id))

    def _send_wanted(
        self, peer: Peer, wanted: list[Lease], found: PackedBatches, rates: StepRates | None
    ) -> None:
        validates = _validates(wanted)
        samples = self._ports.samples if peer.samples is not None and not validates else None
        plan = self._view.plan
        pieces: list[memoryview] = []
        loans = []
        listed: dict[int, list[tuple[int, SampleList | None]]] = {}
        call: Call | None = None
        at = 0
        for lease in wanted:
            step, keys = lease.step, lease.step.keys_of(lease.span)
            batches = []
            for key in keys:
                packed = samples.as_sent(peer, key, found.get(key)) if samples is not None else found[key]
                batches.append(Batch(key[1], packed.samples, at, packed.item, packed.listed))
                pieces += packed.pieces
                call = packed.call
                at += packed.body_bytes
            number = lease.version if validates else plan.number_of(step)
            if lease.id in self._to_verify:
                sent = SentLease(number, [found[key] for key in keys], rates)
                self._ports.verifier.sent(peer.params, lease, sent)
            place = (max(0, step.epoch), *lease.span, step.count, step.samples)
            loans.append(Loan(lease.id, *place, batches, step.apart, number, validates))
            if samples is not None:
                listed[lease.id] = [(batch.samples, batch.listed) for batch in batches]
        batch_count = sum([lease.batches for lease in wanted])
        self._ports.peers.allow_vectors(peer, len(wanted))
        leases = [lease.id for lease in wanted]
        now = self._ports.clock()
        peer.works.append(SentWork(leases, batch_count, now, listed, validates))
        self._meters.trace.sent(wanted, now)
        measures = not validates and any(self._meters.noise.wants(lease.step) for lease in wanted)
        before = peer.connection.bytes_sent
        link = peer.connection.reported_link
        work = Work(peer.params.version, loans, link, measures, rates, peer.counted, call)
        peer.connection.send(work, pieces)
        if not validates:
            self._meters.sent_data(loans[0].epoch, peer.connection.bytes_sent - before)


def _validates(leases: list[Lease]) -> bool:
    """Whether leases that are sent together are of a validation: all of them are, or none."""
    return leases[0].step.validates
