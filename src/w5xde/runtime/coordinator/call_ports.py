"""The ports of a pool: batches that its caller gives, and parameters that are sent only if it changed them.

They take the places of the loader and of the encoder of a run. Know no leases and no connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

from w5xde.learn.calls.call_learner import CallLearner
from w5xde.learn.data.parts import PartSource
from w5xde.learn.data.payload import Packed
from w5xde.learn.data.sources import Key
from w5xde.runtime.coordinator.parameters import ParameterEncoder
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.ports import Snapshot
from w5xde.runtime.telemetry.metrics_rows import DataAhead

NOTHING: Final = "nothing"
MOVING_PART: Final = "moving part"
WHOLE: Final = "whole"
Lacked = Literal["nothing", "moving part", "whole"]


class CallBatches:
    """The parts of the call under way, which are packed already."""

    def __init__(self, source: PartSource) -> None:
        self._packed = source.packed

    def start(
        self,
        *,
        read_seconds: float,
        discovered: Callable[[int, Sequence[int]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Nothing is read: the core hears of parts when their caller gives them."""

    def stop(self) -> None:
        self._packed.clear()

    @property
    def data_ahead(self) -> DataAhead:
        """Nothing: no lease waits for parts."""
        return DataAhead(0, is_behind=False)

    def at_once(self, keys: list[Key]) -> dict[Key, Packed]:
        return {key: self._packed[key] for key in keys}

    def get(self, key: Key, done: Callable[[Packed], None]) -> None:
        done(self._packed[key])

    def release(self, keys: list[Key]) -> None:
        for key in keys:
            self._packed.pop(key, None)


class ChangedState(Protocol):
    """The state of a model that its caller changes."""

    @property
    def moved_at(self) -> int:
        """The version since which the moving part is as it is."""

    @property
    def fixed_at(self) -> int:
        """The version since which the rest is as it is."""


def part_lacked(state: ChangedState, known: int) -> Lacked:
    """The part of the state that a peer lacks which was sent that of version `known` (-1: none)."""
    if known < state.fixed_at:
        return WHOLE
    return MOVING_PART if known < state.moved_at else NOTHING


class CallParameters(ParameterEncoder):
    """Encodes the caller's parameters for nodes that have not got them as they are now."""

    def __init__(self, learner: CallLearner, setting: str, clock: Callable[[], float]) -> None:
        super().__init__(learner, setting, clock)
        self._changes = learner

    def get(self, peer: Peer, *, whole: bool, ahead: float) -> Snapshot:
        lacked = part_lacked(self._changes, peer.params.version)
        if lacked == NOTHING:
            return Snapshot(self._changes.version, [], 0)
        return super().get(peer, whole=whole or lacked == WHOLE, ahead=ahead)
