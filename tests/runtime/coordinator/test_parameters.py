"""Parameters as they are sent: of the newest version, looking ahead as the lease wants, in any codec."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from tests.learn.jobs import make, mlp, settings
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution, Total
from w5xde.runtime.coordinator.parameters import ParameterEncoder
from w5xde.runtime.pipeline.peer import Peer
from w5xde.runtime.pipeline.ports import Snapshot

CODECS = ["none", "shuffle|zlib:1", "bf16|zlib:1"]


def moved_learner() -> Learner:
    """A learner that has made steps since somebody first asked it to look ahead."""
    learner = prepare(make(mlp()), settings(mode="async")).learner
    learner.snapshot(whole=False, ahead=1.0)
    for _ in range(2):
        step(learner)
    return learner


def step(learner: Learner) -> None:
    vector = learner.flat.blueprint.new_vector()
    vector.parts[0].fill_(0.5)
    with torch.no_grad():
        learner.apply([Total(1, Contribution(vector, frozenset(), 1.0, learner.gauge.norm(vector)))])


def peer() -> Peer:
    return Peer(cast(Any, None), cast(Any, None), name="a")


def decoded(learner: Learner, snapshot: Snapshot, *, whole: bool) -> bytes:
    groups = learner.flat.blueprint.groups if whole else learner.flat.blueprint.moving_groups
    out = torch.zeros(learner.flat.byte_count(whole=whole), dtype=torch.uint8)
    (frame,) = snapshot.frames
    parse(frame.message.codec).decode(bytearray(b"".join(frame.pieces)), out, groups)
    return bytes(out.numpy())


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("codec", CODECS[:2])
def test_a_node_gets_the_very_weights_that_are_kept_for_verification(codec: str, whole: bool) -> None:
    learner = moved_learner()
    encoder = ParameterEncoder(learner, codec, lambda: 0.0)
    kept = bytes(encoder.kept_copy(1.0).state)
    sent = decoded(learner, encoder.get(peer(), whole=whole, ahead=1.0), whole=whole)
    assert sent == kept[: len(sent)]
    assert sent != decoded(learner, encoder.get(peer(), whole=whole, ahead=0.0), whole=whole)


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_encoded_is_used_again_only_for_the_same_look_ahead_of_the_same_version(codec: str) -> None:
    learner = moved_learner()
    encoder = ParameterEncoder(learner, codec, lambda: 0.0)

    def bits(ahead: float) -> bytes:
        return decoded(learner, encoder.get(peer(), whole=False, ahead=ahead), whole=False)

    found = [bits(ahead) for ahead in (0.0, 0.5, 1.0)]
    assert len(set(found)) == 3
    assert [bits(ahead) for ahead in (0.0, 0.5, 1.0)] == found
    step(learner)
    assert not {bits(ahead) for ahead in (0.0, 0.5, 1.0)} & set(found)


def test_parameters_that_do_not_look_ahead_are_read_where_they_are() -> None:
    learner = moved_learner()
    encoder = ParameterEncoder(learner, "none", lambda: 0.0)
    plain, ahead = (encoder.get(peer(), whole=False, ahead=ahead) for ahead in (0.0, 1.0))
    assert plain.sent is not None
    assert ahead.sent is None
    plain.sent()
