"""Parameters: encodes the newest version for nodes, once for all nodes that use the same codec.

Knows no leases and no connections, and does not decide when parameters are sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from w5xde.compression import AUTO, AUTO_LOSSY, NONE
from w5xde.learn.codecs.pipeline import CodecPipeline, parse
from w5xde.learn.codecs.sender import CodecSender, is_never_encoded
from w5xde.learn.rounds.replica import Replica
from w5xde.learn.step.learner import Learner
from w5xde.messages import Params
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.ports import ParameterFrame, Snapshot


class ParameterEncoder:
    """Encodes the learner's newest version. Called only where the learner may be used, on its thread."""

    def __init__(self, learner: Learner, setting: str, clock: Callable[[], float]) -> None:
        self._learner = learner
        self._setting = setting
        self._clock = clock
        self._blueprint = learner.flat.blueprint
        self._is_plain = is_never_encoded(setting, self._blueprint.moving_bytes)
        # The codec of a node's first parameters, before the speed of its link is measured.
        self._whole = parse(NONE if setting in (AUTO, AUTO_LOSSY) else setting)
        self._made: dict[tuple[bool, str, float], Snapshot] = {}

    def get(self, peer: Peer, *, whole: bool, ahead: float) -> Snapshot:
        """The newest version, encoded for this peer's link; `whole`: with the parts that never change.

        `ahead`: its trained parameters look ahead by so many updates.
        """
        if self._is_plain:
            return self._raw(whole=whole, ahead=ahead)
        pipeline = self._whole if whole else self._pipeline(peer)
        if pipeline.spec == NONE:
            return self._raw(whole=whole, ahead=ahead)
        version = self._learner.version
        if any(made.version != version for made in self._made.values()):
            self._made.clear()
        made = self._made.get((whole, pipeline.spec, ahead))
        if made is None:
            groups = self._blueprint.groups if whole else self._blueprint.moving_groups
            raw = self._ahead(whole=whole, ahead=ahead) if ahead else self._state(whole=whole)
            message = Params(version, whole, pipeline.spec)
            frame = ParameterFrame(message, pipeline.encode(raw, groups))
            made = Snapshot(version, [frame], raw.numel())
            self._made[whole, pipeline.spec, ahead] = made
        return made

    def kept_copy(self, ahead: float) -> Replica:
        """Every parameter and buffer of the newest version, as bytes that do not change."""
        return Replica(self._learner.snapshot(whole=True, ahead=ahead))

    def rates(self, steps: int) -> None:
        """Nothing: nodes make no steps."""

    def _raw(self, *, whole: bool, ahead: float) -> Snapshot:
        version = self._learner.version
        reading = self._learner.read_state(whole=whole, ahead=ahead)
        if reading is None:
            raw, done = self._learner.snapshot(whole=whole, ahead=ahead), None
        else:
            raw, done = reading
        return Snapshot(version, [ParameterFrame(Params(version, whole, NONE), [raw])], len(raw), done)

    def _state(self, *, whole: bool) -> torch.Tensor:
        count = self._learner.flat.byte_count(whole=whole)
        return self._learner.flat.state[:count].cpu()

    def _ahead(self, *, whole: bool, ahead: float) -> torch.Tensor:
        return torch.frombuffer(self._learner.snapshot(whole=whole, ahead=ahead), dtype=torch.uint8)

    def _pipeline(self, peer: Peer) -> CodecPipeline:
        if peer.sender is None:
            groups = self._blueprint.moving_groups
            peer.sender = CodecSender(self._setting, "down", groups, peer.choice, self._clock)
        return peer.sender.choose(self._state(whole=False), self._clock())
