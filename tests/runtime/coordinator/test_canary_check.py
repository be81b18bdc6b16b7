"""The canary check: which nodes may take part, what is guessed of their speed, how long they may take."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import CPU, welcome_of
from w5xde import Job
from w5xde.learn.job.coordinator_setup import Prepared, prepare
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model.device import exact_products
from w5xde.learn.trust.sketch import ROW
from w5xde.messages import Ready
from w5xde.protocol.wire import GREETING_LIMITS
from w5xde.runtime.coordinator.canary_check import (
    CHECK_SECONDS_MIN,
    FIRST_LINK_BYTES_PER_SECOND,
    GUESS_FACTOR_MAX,
    CanaryCheck,
)
from w5xde.runtime.net.connection import Connection
from w5xde.runtime.net.listener import Candidate
from w5xde.runtime.pipeline.peer import AnnouncedCache, Peer

JOB = make(mlp(lambda: nn.BatchNorm1d(16)))


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(JOB, settings())


@pytest.fixture
def peer() -> Peer:
    # Nobody here speaks to it.
    return Peer(cast(Connection, None), cast(Candidate, None), name="apple")


def proof(prepared: Prepared) -> tuple[str, bytearray]:
    return proof_of(JOB, prepared)


def proof_of(job: Job, prepared: Prepared) -> tuple[str, bytearray]:
    parts = prepare_node(job, welcome_of(prepared), CPU)
    assert prepared.canary is not None
    parts.prove(welcome_of(prepared), prepared.canary.body)
    assert parts.proof is not None
    return parts.layout_digest, bytearray(parts.proof.body)


def moving(prepared: Prepared) -> float:
    """What the model and its gradient take to go and come."""
    return 2 * prepared.learner.vector_bytes / FIRST_LINK_BYTES_PER_SECOND


def test_who_proves_itself_is_taken_with_a_guess_of_its_speed(prepared: Prepared, peer: Peer) -> None:
    check = CanaryCheck(prepared, verifies=False)
    digest, body = proof(prepared)
    assert prepared.canary is not None
    assert check.limits == GREETING_LIMITS._replace(body_bytes_max=len(body))
    assert check.objection(peer, Ready(digest, 3 * prepared.canary.seconds, 5e6), body) is None
    assert peer.guess_seconds == pytest.approx(3 * prepared.batch_seconds + moving(prepared))


@pytest.mark.parametrize(
    ("seconds", "times"),
    [(1e-30, 1 / GUESS_FACTOR_MAX), (1e8, GUESS_FACTOR_MAX), (0.0, None), (float("nan"), None), (-1.0, None)],
)
def test_nobody_is_taken_at_his_word_to_be_far_faster_or_slower(
    seconds: float, times: float | None, prepared: Prepared, peer: Peer
) -> None:
    digest, body = proof(prepared)
    assert (
        CanaryCheck(prepared, verifies=False).objection(peer, Ready(digest, seconds, float("inf")), body)
        is None
    )
    expected = None if times is None else pytest.approx(times * prepared.batch_seconds + moving(prepared))
    assert peer.guess_seconds == expected


def test_a_peer_that_only_looks_gets_and_may_send_the_bytes_of_its_probe_and_is_refused_all_the_same(
    prepared: Prepared, peer: Peer
) -> None:
    check = CanaryCheck(prepared, verifies=False)
    # Of a node that works, a probe means nothing.
    peer.probe_bytes = 1000
    assert check.limits_of(peer) == check.limits
    assert check.canary(peer)[0] is not None
    peer.is_looking = True
    canary, pieces = check.canary(peer)
    assert (canary, [len(piece) for piece in pieces]) == (None, [1000])
    assert check.limits_of(peer) == GREETING_LIMITS._replace(body_bytes_max=1000)
    objection = check.objection(peer, Ready(""), bytearray(1000))
    assert objection is not None
    assert objection.code == "W5-113"
    peer.probe_bytes = 0
    assert check.canary(peer) == (None, [])
    assert check.limits_of(peer) == GREETING_LIMITS


def test_each_objection_has_its_code(prepared: Prepared, peer: Peer) -> None:
    check = CanaryCheck(prepared, verifies=False)
    digest, body = proof(prepared)
    found = []
    for ready, given in [
        (Ready("another"), body),
        (Ready(digest), body[:-1]),
        (Ready(digest), bytearray(len(body))),
    ]:
        objection = check.objection(peer, ready, given)
        assert objection is not None
        found.append(objection.code)
    peer.is_looking = True
    looking = check.objection(peer, Ready(digest), body)
    assert looking is not None
    assert [*found, looking.code] == ["W5-201", "W5-120", "W5-212", "W5-113"]
    assert check.canary(peer) == (None, [])
    assert peer.guess_seconds is None


def test_a_node_says_which_samples_it_keeps_and_not_of_more_than_there_are(peer: Peer) -> None:
    caching = prepare(JOB, settings(data="cached"))
    check = CanaryCheck(caching, verifies=False)
    digest, body = proof(caching)
    samples = caching.rules.data_samples
    most = bytearray(-(-samples // 8))
    assert check.limits.body_bytes_max == len(body) + len(most)
    assert check.objection(peer, Ready(digest, cache=b"id", cache_slots=9), body + b"\x05\x01") is None
    assert peer.announced == AnnouncedCache(b"id", 9, b"\x05\x01")
    for ready, bits in (
        (Ready(digest, cache=b"id", cache_slots=samples + 1), bytearray(-(-(samples + 1) // 8))),
        (Ready(digest, cache=b"id", cache_slots=2**61), most),
        (Ready(digest, cache=b"id", cache_slots=9), b"\x05"),
        (Ready(digest, cache=b"id", cache_slots=9), b"\x05\x01\x00"),
        (Ready(digest, cache=b"id"), b"\x05"),
        (Ready(digest, cache=b"id"), b""),
        (Ready(digest, cache_slots=9), b"\x05\x01"),
    ):
        objection = check.objection(peer, ready, body + bits)
        assert objection is not None
        assert objection.code == "W5-120"


def test_in_a_run_without_caches_a_node_announces_none(prepared: Prepared, peer: Peer) -> None:
    digest, body = proof(prepared)
    ready = Ready(digest, cache=b"id", cache_slots=8)
    objection = CanaryCheck(prepared, verifies=False).objection(peer, ready, body + b"\xff")
    assert objection is not None
    assert objection.code == "W5-120"


def test_without_a_canary_nothing_travels_and_nothing_is_expected(peer: Peer) -> None:
    without = prepare(JOB, settings(canary=False))
    check = CanaryCheck(without, verifies=False)
    assert check.canary(peer) == (None, [])
    assert check.limits == GREETING_LIMITS
    digest = without.learner.flat.blueprint.layout.digest()
    assert check.objection(peer, Ready(digest, 1.0), bytearray()) is None
    assert peer.guess_seconds is None


def drawing(*, canary: bool) -> Prepared:
    return prepare(make(mlp(lambda: nn.Dropout(0.5))), settings(canary=canary))


def test_a_run_that_verifies_refuses_a_node_that_draws_other_numbers_whatever_it_says(peer: Peer) -> None:
    prepared = drawing(canary=True)
    digest, body = proof_of(make(mlp(lambda: nn.Dropout(0.5))), prepared)
    check = CanaryCheck(prepared, verifies=True)
    # What it says of its device changes nothing.
    for peer.device in ("cpu", "cuda"):
        assert check.objection(peer, Ready(digest), body) is None
    torch.frombuffer(body, dtype=torch.float64)[:ROW] += 1.0
    for peer.device in ("cpu", "cuda"):
        objection = check.objection(peer, Ready(digest), body)
        assert objection is not None
        assert objection.code == "W5-214"
    assert CanaryCheck(prepared, verifies=False).objection(peer, Ready(digest), body) is None


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", False), ("cuda", True), ("", True)])
def test_without_a_canary_a_node_that_may_draw_other_numbers_is_refused_not_exempt(
    device: str, is_refused: bool, peer: Peer
) -> None:
    prepared = drawing(canary=False)
    peer.device = device
    digest = prepared.learner.flat.blueprint.layout.digest()
    objection = CanaryCheck(prepared, verifies=True).objection(peer, Ready(digest), bytearray())
    assert (objection is not None) == is_refused
    assert CanaryCheck(prepared, verifies=False).objection(peer, Ready(digest), bytearray()) is None


def test_who_is_not_ready_for_very_long_is_cut_but_not_for_the_time_that_we_slept(
    prepared: Prepared, peer: Peer
) -> None:
    check = CanaryCheck(prepared, verifies=False)
    peer.welcomed_at = 100.0
    late = 100.0 + CHECK_SECONDS_MIN + 1
    assert check.complaint(peer, 100.0 + CHECK_SECONDS_MIN - 1, 0.0) == ""
    assert check.complaint(peer, late, 0.0) == "it was not ready after 600 s"
    assert check.complaint(peer, late, late - 10) == ""
    peer.is_ready = True
    assert check.complaint(peer, late, 0.0) == ""


def test_a_gpu_multiplies_exactly_for_the_canary_and_then_as_its_user_wants() -> None:
    before = torch.backends.cudnn.allow_tf32
    with exact_products(torch.device("cuda")):
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before
    with exact_products(CPU):
        assert torch.backends.cudnn.allow_tf32 == before
