"""Proving: who has shown enough to take part, what is guessed of him, and how long anybody may take."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import CPU, welcome_of
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model.device import exact_products
from w5xde.messages import Ready
from w5xde.protocol.wire import GREETING_LIMITS
from w5xde.runtime.coordinator.canary_check import (
    FIRST_LINK_BYTES_PER_SECOND,
    GUESS_FACTOR_MAX,
    PROVING_SECONDS_MIN,
    Proving,
)
from w5xde.runtime.coordinator.peer import Peer
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.net.listener import Candidate

JOB = make(mlp(lambda: nn.BatchNorm1d(16)))


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(JOB, settings())


@pytest.fixture
def peer() -> Peer:
    # Nobody here speaks to it.
    return Peer(cast(Connection, None), cast(Candidate, None), name="apple")


def proof(prepared: Prepared) -> tuple[str, bytearray]:
    parts = prepare_node(JOB, welcome_of(prepared), CPU)
    assert prepared.canary is not None
    parts.prove(welcome_of(prepared), prepared.canary.body)
    assert parts.proof is not None
    return parts.layout_digest, bytearray(parts.proof.body)


def moving(prepared: Prepared) -> float:
    """What the model and its gradient take to go and come."""
    return 2 * prepared.learner.vector_bytes / FIRST_LINK_BYTES_PER_SECOND


def test_who_proves_itself_is_taken_with_a_guess_of_its_speed(prepared: Prepared, peer: Peer) -> None:
    proving = Proving(prepared)
    digest, body = proof(prepared)
    assert prepared.canary is not None
    assert proving.limits == GREETING_LIMITS._replace(body_bytes_max=len(body))
    assert proving.objection(peer, Ready(digest, 3 * prepared.canary.seconds, 5e6), body) is None
    assert peer.guess_seconds == pytest.approx(3 * prepared.batch_seconds + moving(prepared))


@pytest.mark.parametrize(
    ("seconds", "times"),
    [(1e-30, 1 / GUESS_FACTOR_MAX), (1e8, GUESS_FACTOR_MAX), (0.0, None), (float("nan"), None), (-1.0, None)],
)
def test_nobody_is_taken_at_his_word_to_be_far_faster_or_slower(
    seconds: float, times: float | None, prepared: Prepared, peer: Peer
) -> None:
    digest, body = proof(prepared)
    assert Proving(prepared).objection(peer, Ready(digest, seconds, float("inf")), body) is None
    expected = None if times is None else pytest.approx(times * prepared.batch_seconds + moving(prepared))
    assert peer.guess_seconds == expected


def test_each_objection_has_its_code(prepared: Prepared, peer: Peer) -> None:
    proving = Proving(prepared)
    digest, body = proof(prepared)
    found = []
    for ready, given in [
        (Ready("another"), body),
        (Ready(digest), body[:-1]),
        (Ready(digest), bytearray(len(body))),
    ]:
        objection = proving.objection(peer, ready, given)
        assert objection is not None
        found.append(objection.code)
    peer.is_looking = True
    looking = proving.objection(peer, Ready(digest), body)
    assert looking is not None
    assert [*found, looking.code] == ["W5-201", "W5-120", "W5-212", "W5-113"]
    assert proving.canary(peer) == (None, [])
    assert peer.guess_seconds is None


def test_without_a_canary_nothing_travels_and_nothing_is_expected(peer: Peer) -> None:
    without = prepare(JOB, settings(canary=False))
    proving = Proving(without)
    assert proving.canary(peer) == (None, [])
    assert proving.limits == GREETING_LIMITS
    digest = without.learner.flat.blueprint.layout.digest()
    assert proving.objection(peer, Ready(digest, 1.0), bytearray()) is None
    assert peer.guess_seconds is None


def test_who_is_not_ready_for_very_long_is_cut_but_not_for_the_time_that_we_slept(
    prepared: Prepared, peer: Peer
) -> None:
    proving = Proving(prepared)
    peer.welcomed_at = 100.0
    late = 100.0 + PROVING_SECONDS_MIN + 1
    assert proving.complaint(peer, 100.0 + PROVING_SECONDS_MIN - 1, 0.0) == ""
    assert proving.complaint(peer, late, 0.0) == "it was not ready after 600 s"
    assert proving.complaint(peer, late, late - 10) == ""
    peer.is_ready = True
    assert proving.complaint(peer, late, 0.0) == ""


def test_a_gpu_multiplies_exactly_for_the_canary_and_then_as_its_user_wants() -> None:
    before = torch.backends.cudnn.allow_tf32
    with exact_products(torch.device("cuda")):
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before
    with exact_products(CPU):
        assert torch.backends.cudnn.allow_tf32 == before
