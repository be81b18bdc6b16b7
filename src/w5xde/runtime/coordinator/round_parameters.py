"""Parameters in rounds mode: the differences that a node lacks, or the replica if it has none.

Called only where the learner may be used, on its thread. Knows no leases and no connections.
"""

from __future__ import annotations

import torch

from w5xde.compression import NONE
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.rounds.rounds import EXACT_CODEC, Rounds
from w5xde.learn.step.learner import Learner
from w5xde.message_types import StepRates
from w5xde.messages import Params
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.ports import ParameterFrame, Snapshot


class RoundParameters:
    """Brings peers to the newest version by differences, and by the replica itself."""

    def __init__(self, learner: Learner, rounds: Rounds, setting: str) -> None:
        self._learner = learner
        self._rounds = rounds
        self._snapshot_codec = parse(NONE if setting == NONE else EXACT_CODEC)
        # The newest version as a whole, encoded once for all nodes that need it.
        self._made: ParameterFrame | None = None

    def get(self, peer: Peer, *, whole: bool, ahead: float) -> Snapshot:
        """What the peer lacks of the newest version. Nothing looks ahead in this mode."""
        version, raw_bytes = self._learner.version, self._learner.vector_bytes
        # A peer that came back says what it has; its hash is compared.
        known, digest = (peer.params.version, b"") if peer.params.version >= 0 else peer.replica
        missing = self._rounds.since(known, digest, version) if known >= 0 else None
        if missing is not None:
            return Snapshot(version, [ParameterFrame(*sent) for sent in missing], raw_bytes)
        last = self._rounds.last_sent(version)
        frames = [self._whole(version), *([ParameterFrame(*last)] if last is not None else [])]
        return Snapshot(version, frames, raw_bytes)

    def _whole(self, version: int) -> ParameterFrame:
        if self._made is None or self._made.message.version != version:
            raw = torch.frombuffer(self._rounds.replica().state, dtype=torch.uint8)
            pieces = self._snapshot_codec.encode(raw, self._learner.flat.blueprint.groups)
            self._made = ParameterFrame(Params(version, whole=True, codec=self._snapshot_codec.spec), pieces)
        return self._made

    def kept_copy(self, ahead: float) -> Replica:
        return self._rounds.replica()

    def rates(self, steps: int) -> StepRates:
        return self._rounds.step_rates(self._learner.version, steps)
