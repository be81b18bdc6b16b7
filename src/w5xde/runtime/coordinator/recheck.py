"""The verifier: computes what nodes were lent once more, on a thread of the coordinator's, and compares.

It needs the very parameters the node had: those are kept from when the work is sent until its answer is
verified. What cannot be verified, because they are gone by then or too many wait, passes, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.steps.leases import Lease
from w5xde.control.steps.plan import StepPlan
from w5xde.learn.data.payload import Packed, unpack
from w5xde.learn.data.sources import MapSource
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.model.device import use_threads
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution
from w5xde.learn.train.trainer import Task
from w5xde.learn.trust.recompute import SecondOpinion, task_of
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.system.actor import Actor
from w5xde.tree import Span, batch_seed

# Parameters of so many versions are kept at most: each is as large as the model.
VERSIONS_MAX = 4


@dataclass(slots=True)
class _Sent:
    """A lease that will be verified, as it was sent."""

    version: int
    batches: list[Packed]


class Verifier:
    """`verified` hears of every answer that was to be verified; `is_outstanding`: it may still come."""

    def __init__(
        self,
        prepared: Prepared,
        settings: Settings,
        learner_actor: Actor,
        is_outstanding: Callable[[int], bool],
        failed: Callable[[BaseException], None],
        verified: Callable[[ev.Verified], None],
    ) -> None:
        self._prepared = prepared
        self._learner: Learner = prepared.learner
        self._learner_actor = learner_actor
        self._actor = Actor(
            "w5xde-verifier", failed, inline=False, prepare=lambda: use_threads(settings.threads)
        )
        self._is_outstanding = is_outstanding
        self._verified = verified
        self._sent: dict[int, _Sent] = {}
        self._params: dict[int, memoryview] = {}
        self._second: SecondOpinion | None = None
        self.passed = 0

    def sent(self, peer: Peer, lease: Lease, batches: list[Packed]) -> None:
        """This is being sent to a peer, and its answer will have to be verified."""
        if self._prepared.draws_torch and peer.device != "cpu":
            return  # other devices draw other numbers: nothing there can be compared
        version = peer.version
        # Some ended without an answer.
        self._sent = {number: sent for number, sent in self._sent.items() if self._is_outstanding(number)}
        self._sent[lease.id] = _Sent(version, batches)
        if version not in self._params and len(self._params) < VERSIONS_MAX:
            self._learner_actor.call(
                lambda: self._learner.snapshot(whole=True) if self._learner.version == version else None,
                lambda copy: self._keep(version, copy),
            )

    def _keep(self, version: int, copy: memoryview | None) -> None:
        if copy is not None:
            self._params[version] = copy

    def verify(self, lease: Lease, given: list[Contribution] | None) -> None:
        """Compare what was given for the lease with what it should be."""
        sent = self._sent.get(lease.id)
        params = self._params.get(sent.version) if sent is not None else None
        if sent is None or given is None or params is None:
            self.passed += 1
            self._done(lease, "")
            return
        self._actor.call(
            lambda: self._compare(lease, given, params, sent.batches), lambda wrong: self._done(lease, wrong)
        )

    def _compare(
        self, lease: Lease, given: list[Contribution], params: memoryview, batches: list[Packed]
    ) -> str:
        if self._second is None:
            self._second = SecondOpinion(self._prepared.make_trainer(), self._prepared.rules.precision)
        if not lease.step.apart:
            return self._second.wrong_with(
                given[0].vector, params, self._task(lease.step, lease.span, batches)
            )
        for step, each, batch in zip(
            lease.step.singly[lease.span.start : lease.span.stop], given, batches, strict=True
        ):
            wrong = self._second.wrong_with(each.vector, params, self._task(step, Span(0, 1), [batch]))
            if wrong:
                return wrong
        return ""

    def _task(self, step: StepPlan, span: Span, batches: list[Packed]) -> Task:
        values = []
        for place, packed in zip(range(span.start, span.stop), batches, strict=True):
            value = unpack(packed.item, bytearray(b"".join(packed.pieces)))
            source = self._prepared.source
            if self._prepared.rules.data == "local" and isinstance(source, MapSource):
                seed = batch_seed(self._prepared.rules.seed, step.epoch, step.first + place)
                value = source.read_indices(value, seed)
            values.append(value)
        return task_of(step.epoch, span, step.sizes, step.first, values)

    def _done(self, lease: Lease, wrong: str) -> None:
        self._sent.pop(lease.id, None)
        needed = {sent.version for sent in self._sent.values()}
        self._params = {version: copy for version, copy in self._params.items() if version in needed}
        self._verified(ev.Verified(lease.node, lease.id, wrong))

    def stop(self) -> None:
        self._actor.stop()
