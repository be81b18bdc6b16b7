"""A node believes its coordinator in what is to be computed, and in no number that would fill its memory."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import w5xde
import w5xde.runtime.node.body
from tests.protocol.streams import around, feed
from tests.security.measure import KIB, MIB, peak_bytes, refusal_of
from tests.sockets import answering, clear_ticket
from tests.system.jobs import job
from w5xde.config import Settings
from w5xde.errors import JoinError, RemoteProtocolError, W5xdeError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.job.node_setup import NodeParts, prepare_node
from w5xde.learn.model.layout import Blueprint
from w5xde.message_types import ENTRIES_MAX, Bytes, TensorAt, Value
from w5xde.messages import Batch, Loan, Params, SampleList, Welcome, Work
from w5xde.protocol.wire import Decoder, Limits, encode
from w5xde.runtime.node import limits as expected
from w5xde.runtime.node.executor import WorkExecutor
from w5xde.runtime.node.limits import DISCARDED, WELCOME_LIMITS, Discard, NodeLimits
from w5xde.runtime.node.worker import NodeWorker

RULES = {"mode": "sync", "seed": 0, "precision": "fp32", "threads": 1, "data": "stream"}
BATCH = Batch(0, 2, 0, Value(1))
LOAN = Loan(7, 0, 0, 1, 4, 8, [BATCH])
SEVERAL = Loan(8, 0, 0, 2, 4, 8, [BATCH, Batch(1, 2, 0, Value(1))])
GIB = 1024 * MIB


@pytest.fixture(scope="module")
def blueprint() -> Blueprint:
    return prepare(job, Settings()).learner.flat.blueprint


def welcome(blueprint: Blueprint, **rules: Any) -> dict[str, Any]:
    layout = msgspec.to_builtins(blueprint.layout)
    return {
        "type": "welcome",
        "run": "tuesday",
        "incarnation": 1,
        "name": "guest",
        "layout": layout,
        "rules": RULES | rules,
    }


def saying(*frames: bytes) -> Callable[[socket.socket], None]:
    """A coordinator that says this, whatever it hears."""

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            if connection.recv(4096):
                connection.sendall(b"".join(frames))
                while connection.recv(4096):
                    pass

    return answer


def joining(*frames: bytes) -> W5xdeError:
    """What a node says that joins such a coordinator."""
    with answering(saying(*frames)) as address, pytest.raises(W5xdeError) as told:
        w5xde.join(clear_ticket(address), job, wait=0)
    return told.value


# --- what it says of the run ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [
        {"threads": 10**6},
        {"threads": 0},
        {"mode": "sideways"},
        {"precision": "fp8"},
        {"data": "everywhere"},
        {"recording": "loudly"},
        {"seed": -1},
        {"seed": 2**63},
        {"data_samples": -5},
    ],
    ids=str,
)
def test_rules_that_no_run_has_are_refused(rules: dict[str, Any], blueprint: Blueprint) -> None:
    error = joining(around(msgspec.msgpack.encode(welcome(blueprint, **rules))))
    assert isinstance(error, JoinError)
    assert error.code == "W5-120"
    assert "makes no sense" in error.what


def test_a_role_that_nobody_knows_is_refused_by_what_it_is(blueprint: Blueprint) -> None:
    said = welcome(blueprint)
    said["layout"]["entries"][0][3] = "borrowed"
    error = joining(around(msgspec.msgpack.encode(said)))
    assert error.code == "W5-120"
    assert "role" in error.what or "borrowed" in error.what


def test_more_threads_than_the_machine_bears_are_refused(blueprint: Blueprint) -> None:
    error = joining(around(msgspec.msgpack.encode(welcome(blueprint, threads=1024))))
    assert error.code == "W5-213"
    assert "1024 threads" in error.what


def test_a_codec_that_nobody_knows_is_refused_before_a_model_is_built(blueprint: Blueprint) -> None:
    said = msgspec.convert(welcome(blueprint, compress="rot13"), type=dict[str, Any])
    error = joining(around(msgspec.msgpack.encode(said)))
    assert error.code == "W5-122"
    assert "rot13" in error.what


def welcome_meta(entries: bytes, canary: bytes) -> bytes:
    """A Welcome whose layout and canary are these bytes of MessagePack."""
    rules = msgspec.msgpack.encode(RULES)
    head = b"\x87\xa4type\xa7welcome\xa3run\xa1r\xabincarnation\x01\xa4name\xa1n"
    return head + b"\xa6layout\x81\xa7entries" + entries + b"\xa5rules" + rules + b"\xa6canary" + canary


def array(items: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + items


# A sixteenth of what is accepted: it is all in proportion.
SMALLER = Limits(WELCOME_LIMITS.meta_bytes_max // 16, 0, "welcome", WELCOME_LIMITS.values_max // 16)
ROOM = SMALLER.meta_bytes_max - 512
ENTRY = b"\x94\xa1w\xa7float32\x90\xa7trained"
FILL = b"\x94" + b"\xca\x3f\x80\x00\x00" * 4
# A letter that takes four bytes, and so all others in its name take four in memory.
WIDE = "\U0001f34e".encode() + b"w" * 100
SHAPE = b"\xdc\x00\x2d" + b"\xcd\x7f\xff" * 45
# As many as are counted and let pass; what room is left, the longest word takes.
MANY = SMALLER.values_max // 3 - 100
LEFT = ROOM - 4 * MANY
GROWING = {
    "as many lists as may be": (
        b"\x90",
        b"\x92\x90\x92\xa1l"
        + array(
            b"\x92\xa1v\xdb"
            + LEFT.to_bytes(4, "big")
            + "\U0001f34e".encode()
            + b"w" * (LEFT - 4)
            + b"\x92\xa1l\x90" * MANY,
            MANY + 1,
        ),
    ),
    "lists": (b"\x90", b"\x92\x90\x92\xa1l" + array(b"\x92\xa1l\x90" * (ROOM // 4), ROOM // 4)),
    "dicts": (b"\x90", b"\x92\x90\x92\xa1l" + array(b"\x93\xa1d\x90\x90" * (ROOM // 5), ROOM // 5)),
    "no fills": (b"\x90", b"\x92" + array(b"\xc0" * ROOM, ROOM) + b"\x92\xa1l\x90"),
    "entries": (array(ENTRY * (ROOM // len(ENTRY)), ROOM // len(ENTRY)), b"\xc0"),
    "shapes": (array((b"\x94\xa1w\xa1f" + SHAPE + b"\xa7trained") * 6_250, 6_250), b"\xc0"),
}


@pytest.mark.parametrize("case", GROWING)
def test_a_welcome_becomes_no_more_than_eight_times_its_limit(case: str) -> None:
    """Whatever its bytes say, and whether the node believes them or not."""
    data = memoryview(around(welcome_meta(*GROWING[case])))
    assert len(data) <= SMALLER.meta_bytes_max + 16
    peak = peak_bytes(lambda: refusal_of(lambda: feed(Decoder(SMALLER), data)))
    assert peak < 8 * SMALLER.meta_bytes_max


def test_the_deepest_model_that_there_may_be_is_welcome() -> None:
    entry = b"\x94\xd9\x68" + WIDE + b"\xa7float32\x92\x01\x01\xa7trained"
    entries, fills = array(entry * ENTRIES_MAX, ENTRIES_MAX), array(FILL * ENTRIES_MAX, ENTRIES_MAX)
    data = memoryview(around(welcome_meta(entries, b"\x92" + fills + b"\x92\xa1l\x90")))
    [(heard, _)] = feed(Decoder(WELCOME_LIMITS), data)
    assert isinstance(heard, Welcome)
    assert len(heard.layout.entries) == ENTRIES_MAX


def test_before_our_model_is_compared_no_other_word_is_read() -> None:
    for message in (Work(0, [LOAN]), Params(0, whole=True)):
        with pytest.raises(RemoteProtocolError, match="makes no sense"):
            feed(Decoder(WELCOME_LIMITS), memoryview(encode(message)))
    with pytest.raises(RemoteProtocolError, match="are accepted now"):
        feed(Decoder(WELCOME_LIMITS), memoryview(encode(Work(0, [LOAN]), 2**36)))


# --- what it sends --------------------------------------------------------------------------------


def refused(do: Callable[[], None]) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        do()
    assert caught.value.code in ("W5-120", "W5-121", "W5-122")
    return caught.value.what


@pytest.mark.parametrize("whole", [True, False])
def test_parameters_are_as_large_as_our_own_model(blueprint: Blueprint, whole: bool) -> None:
    node = NodeLimits(blueprint, GIB)
    right = blueprint.whole_bytes if whole else blueprint.moving_bytes
    node.take(Params(1, whole), bytearray(right))
    for wrong in (0, right - 1, right + 1, 2**36):
        assert "our model has" in refused(lambda wrong=wrong: node.check_size(Params(1, whole), wrong))
    assert "our model has" in refused(lambda: node.take(Params(1, whole), bytearray(right - 1)))
    for codec in ("lz4", "bf16", "shuffle | zstd:1"):
        node.check_size(Params(1, whole, codec), right // 4)
        refused(lambda codec=codec: node.check_size(Params(1, whole, codec), 2 * right + 100_000))
    assert "rot13" in refused(lambda: node.take(Params(1, whole, "rot13"), bytearray(10)))


def test_batches_take_a_part_of_the_memory_that_there_was(blueprint: Blueprint) -> None:
    node = NodeLimits(blueprint, 2 * GIB)
    node.check_size(Work(0, [LOAN]), GIB)
    assert "holds 1073741824 at a time" in refused(lambda: node.check_size(Work(0, [LOAN]), GIB + 1))
    assert node.frame.meta_bytes_max == 32 * MIB
    # A machine that has nothing left still takes small batches, one with much no endless description.
    little = NodeLimits(blueprint, 0)
    assert little.frame.meta_bytes_max == 2 * MIB
    little.check_size(Work(0, [LOAN]), 64 * MIB)
    assert "holds 67108864 at a time" in refused(lambda: little.check_size(Work(0, [LOAN]), 64 * MIB + 1))
    assert NodeLimits(blueprint, 2**50).frame.meta_bytes_max == 64 * MIB


def test_samples_that_arrive_as_numbers_take_the_memory_that_they_need(blueprint: Blueprint) -> None:
    """An empty body may describe any amount: it counts as what would be put together from it."""
    listed = SampleList(bytes(8), b"", bytes(16))
    batch = Batch(0, 2, 0, Value(1), listed)
    loan = Loan(7, 0, 0, 1, 4, 8, [batch])
    node = NodeLimits(blueprint, 2 * GIB, GIB // 2)
    node.check_size(Work(0, [loan]), 0)
    assert f"a batch of {GIB + 1} bytes" in refused(lambda: node.check_size(Work(0, [loan]), 1))
    several = Work(0, [Loan(8, 0, 0, 2, 4, 8, [batch, Batch(1, 2, 0, Value(1), listed)])])
    assert not node.fits(several, 0)
    assert node.take(several, bytearray()) is DISCARDED


def test_a_list_of_samples_is_a_failure_told_by_a_node_that_keeps_none(blueprint: Blueprint) -> None:
    _, bench = ready_to_work(blueprint)
    batch = Batch(0, 2, 0, TensorAt("float32", (2, 10), 0), SampleList(bytes(8), b"", bytes(16)))
    [given] = bench.compute(Work(0, [Loan(7, 0, 0, 1, 4, 8, [batch])]), bytearray()).answers
    assert "this node keeps none" in given.failure


def test_of_several_batches_that_do_not_fit_nothing_is_kept(blueprint: Blueprint) -> None:
    """They are received, for the coordinator to hear that it should lend fewer; but not for ever."""
    node, work = NodeLimits(blueprint, 0), Work(0, [SEVERAL])
    node.check_size(work, GIB)
    assert not node.fits(work, GIB)
    sink = Discard()
    assert len(sink.get_buffer()) <= MIB
    for _ in range(expected.DISCARDED_IN_A_ROW_MAX):
        assert node.take(work, sink.body) is DISCARDED
        node.done(work, 0)
    # What came at once, with its message, is not kept either.
    node = NodeLimits(blueprint, 0)
    assert node.take(work, bytearray(64 * MIB + 1)) is DISCARDED
    assert len(node.take(work, bytearray(64 * MIB))) == 64 * MIB
    for _ in range(expected.DISCARDED_IN_A_ROW_MAX):
        node.take(work, DISCARDED)
        node.done(work, 0)
    assert "again and again" in refused(lambda: node.take(work, DISCARDED))


@pytest.mark.parametrize(
    "loan",
    [
        Loan(7, 0, 0, 2**61, 2**61, 2**61, [BATCH]),
        Loan(7, 0, 0, 1, 2**61, 8, [BATCH]),
        Loan(7, 0, 1, 1, 4, 8, []),
        Loan(7, 0, 2, 1, 4, 8, [BATCH]),
        Loan(7, 0, 0, 2, 1, 8, [BATCH, BATCH]),
        Loan(7, 0, 0, 2, 4, 8, [BATCH]),
        Loan(7, 0, 0, 1, 4, 8, [BATCH, BATCH]),
        Loan(7, 0, 0, 1, 4, 1, [BATCH]),
        Loan(7, 0, 0, 1, 4, 0, [Batch(0, 0, 0, Value(1))]),
        Loan(7, 0, 0, 2, 4, 8, [BATCH, Batch(1, 0, 0, Value(1))]),
    ],
)
def test_work_whose_batches_are_not_those_it_names_is_refused(loan: Loan, blueprint: Blueprint) -> None:
    node = NodeLimits(blueprint, GIB)
    node.take(Work(0, [LOAN]), bytearray())
    assert "makes no sense" in refused(lambda: node.take(Work(0, [LOAN, loan]), bytearray()))


def test_what_waits_here_has_a_limit_in_number_and_in_bytes(blueprint: Blueprint) -> None:
    node, work = NodeLimits(blueprint, GIB // 2), Work(0, [LOAN])
    for _ in range(expected.WAITING_MAX):
        node.take(work, bytearray(10))
    assert "65 messages" in refused(lambda: node.take(work, bytearray(10)))
    batches = bytearray(256 * MIB)
    node = NodeLimits(blueprint, GIB // 2)
    for _ in range(10):
        node.take(work, batches)
        node.take(work, batches)
        node.done(work, 256 * MIB)
        node.done(work, 256 * MIB)
    node.take(work, batches)
    node.take(work, batches)
    assert "more is sent" in refused(lambda: node.take(work, bytearray(1)))


def test_a_description_that_grows_takes_no_more_than_the_part_it_was_given(blueprint: Blueprint) -> None:
    """The worst that we know, at a 64th of the size that would be accepted: memory is in proportion to it."""
    limits = NodeLimits(blueprint, 4 * GIB).frame
    small = limits.meta_bytes_max // 64
    for item in (b"\x92\xa1l\x90", b"\x93\xa1d\x90\x90"):
        count = small // len(item) - 100
        items = b"\x92\xa1l\xdd" + count.to_bytes(4, "big") + item * count
        loan = b"\x97\x07\x00\x00\x01\x04\x08\x91\x94\x00\x02\x00" + items
        meta = b"\x83\xa4type\xa4work\xa7version\x00\xa5loans\x91" + loan
        heard: list[Any] = []
        data = memoryview(around(meta))
        peak = peak_bytes(lambda data=data, heard=heard: heard.extend(feed(Decoder(limits), data)))
        assert isinstance(heard[0][0], Work)
        # Beside what it becomes there is the frame itself, once or twice.
        assert peak < small * (expected.GROWTH + 4)


def test_too_many_loans_or_cancelled_leases_are_not_read() -> None:
    many = msgspec.to_builtins(LOAN)
    limits = Limits(16 * MIB, 0)
    for said in (
        {"type": "work", "version": 0, "loans": [many] * 1025},
        {"type": "work", "version": 0, "loans": []},
        {"type": "cancel", "leases": [1] * 100_000},
    ):
        with pytest.raises(RemoteProtocolError, match="makes no sense"):
            feed(Decoder(limits), memoryview(around(msgspec.msgpack.encode(said))))


def ready_to_work(blueprint: Blueprint, **rules: Any) -> tuple[NodeParts, NodeWorker]:
    said = msgspec.convert(welcome(blueprint, **rules), type=Welcome)
    parts = prepare_node(job, said, torch.device("cpu"))
    return parts, NodeWorker(parts, lambda: 0.0, lambda lease: False)


def test_indices_that_are_not_of_our_data_are_a_failure_told_and_nothing_more(blueprint: Blueprint) -> None:
    source = prepare(job, Settings(data="local"))
    rules = source.rules
    _, bench = ready_to_work(
        blueprint, data="local", data_samples=rules.data_samples, data_digest=rules.data_digest
    )

    def answer(values: torch.Tensor, item: Any = None) -> str:
        described = item or TensorAt(str(values.dtype).removeprefix("torch."), tuple(values.shape), 0)
        loan = Loan(7, 0, 0, 1, 4, 8, [Batch(0, 2, 0, described)])
        body = bytearray(values.contiguous().view(torch.uint8).numpy().tobytes())
        [given] = bench.compute(Work(0, [loan], math.inf), body).answers
        return given.failure

    assert answer(torch.tensor([0, 199])) == ""
    for wrong in ([0, 200], [-1, 0], [0, 1, 2], [0.0, 1.0], [[0, 1]]):
        assert "does not name 2 of our samples" in answer(torch.tensor(wrong))
    for item in (Value("all"), Bytes(b"0"), Value(None)):
        assert "does not name" in answer(torch.tensor([0, 1]), item)


def test_a_node_at_work_hangs_up_on_64_gib_before_it_receives_them(
    blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sockets: it says so by its code, and has not taken memory for any of it."""
    placed: list[int] = []
    monkeypatch.setattr(WorkExecutor, "place", lambda self, message, count, *, is_idle: placed.append(count))
    heard = threading.Event()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            if connection.recv(4096):
                connection.sendall(around(msgspec.msgpack.encode(welcome(blueprint))))
                while b"ready" not in connection.recv(4096):
                    pass
                connection.sendall(encode(Work(0, [LOAN]), 2**36) + bytes(KIB))
                while connection.recv(4096):
                    pass
                heard.set()

    with answering(answer) as address:
        # What it cannot take now it cannot take later: it does not come back for it.
        with pytest.raises(JoinError, match="a batch of 68719476736 bytes") as caught:
            w5xde.join(clear_ticket(address), job, wait=0)
        assert heard.wait(10)
    assert caught.value.code == "W5-121"
    assert placed == []
