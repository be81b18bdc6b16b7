"""Snapshots: the parameters of a version as they travel, made once for all nodes that want them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from w5xde.compression import AUTO, AUTO_LOSSY, NONE
from w5xde.learn.codecs.pipeline import Pipeline, parse
from w5xde.learn.codecs.sender import SMALL_BYTES, CodecSender
from w5xde.learn.learner import Learner
from w5xde.runtime.reception import Peer


class Snapshot(NamedTuple):
    """One version, encoded; the pieces stay as they are."""

    version: int
    codec: str
    pieces: list[memoryview]
    raw_bytes: int
    encoded_bytes: int


class Snapshots:
    """Encodes versions; used only where the learner is."""

    def __init__(self, learner: Learner, setting: str, clock: Callable[[], float]) -> None:
        self._learner = learner
        self._setting = setting
        self._clock = clock
        self._blueprint = learner.flat.blueprint
        is_auto = setting in (AUTO, AUTO_LOSSY)
        self._is_plain = setting == NONE or (is_auto and self._blueprint.moving_bytes < SMALL_BYTES)
        # What a node gets first, before anything is known of its link.
        self._whole = parse(NONE if is_auto else setting)
        self._made: dict[tuple[bool, str], Snapshot] = {}

    def get(self, peer: Peer, *, whole: bool) -> Snapshot:
        """The newest version, as it suits this peer."""
        raw = self._learner.snapshot(whole=whole)
        version = self._learner.version
        if self._is_plain:
            return Snapshot(version, NONE, [raw], len(raw), len(raw))
        vector = torch.frombuffer(raw, dtype=torch.uint8)
        pipeline = self._whole if whole else self._pipeline(peer, vector)
        made = self._made.get((whole, pipeline.spec))
        if made is None or made.version != version:
            groups = self._blueprint.groups if whole else self._blueprint.moving_groups
            pieces = [raw] if pipeline.spec == NONE else pipeline.encode(vector, groups)
            encoded_bytes = sum(map(len, pieces))
            made = Snapshot(version, pipeline.spec, pieces, len(raw), encoded_bytes)
            self._made[whole, pipeline.spec] = made
        return made

    def _pipeline(self, peer: Peer, vector: torch.Tensor) -> Pipeline:
        if peer.sender is None:
            groups = self._blueprint.moving_groups
            peer.sender = CodecSender(self._setting, "down", groups, peer.choice, self._clock)
        return peer.sender.choose(vector, self._clock())
