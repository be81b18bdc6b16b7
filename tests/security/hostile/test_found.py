"""What the properties found, each once more as a story of its own."""

from __future__ import annotations

import io

import msgspec
import pytest

from tests.protocol.streams import around, feed
from tests.security import files
from tests.security.measure import KIB, MIB, peak_bytes, refusal_of
from w5xde.cli.view import View
from w5xde.config import Settings
from w5xde.errors import RemoteProtocolError, StorageError
from w5xde.learn.data.payload import Unpacker, unpack
from w5xde.message_types import ListOf, TensorAt
from w5xde.messages import TRAINED, Answer, Entry, Layout, Update
from w5xde.protocol.wire import GREETING_LIMITS, Decoder, Limits, encode
from w5xde.runs import MANIFEST, read_manifest
from w5xde.runtime.coordinator.peers import update_limits
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.ledger_segments import LedgerReader
from w5xde.runtime.durable.resume import restore
from w5xde.runtime.durable.sealed_json import Damaged
from w5xde.runtime.evaluation.export import export_run

NOT_UTF8 = b'{"kind":"\xff"}'


def test_a_manifest_with_a_right_hash_and_text_that_is_not_utf8_is_damaged():
    name = "checkpoints/step-000000001/manifest.json"
    disk = files.disk_with({name: files.sealed_manifest(b'{"format":1,"facts":{"a":"\xff"}}')})
    with pytest.raises(Damaged, match="makes no sense"):
        CheckpointStore(disk).read(1)


@pytest.mark.parametrize("line", [0, 1])
def test_a_line_of_the_ledger_with_a_right_hash_and_text_that_is_not_utf8_is_damage(line):
    head = b'{"kind":"segment","number":1,"after":"%s","records":0,"life":1}' % files.NOTHING.encode()
    lines = [head, b'{"kind":"joined"}']
    lines[line] = NOT_UTF8
    reading = LedgerReader(files.disk_with({"ledger-000001.jsonl": files.ledger_of(lines)}))
    assert list(reading.records()) == []
    assert reading.damage == [f"ledger-000001.jsonl: line {line + 1} is not what was written"]


@pytest.mark.parametrize("data", [NOT_UTF8, b"[" * 100_000])
def test_a_run_whose_manifest_is_nonsense_is_refused_with_a_sentence(data, tmp_path):
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(StorageError, match="cannot be read"):
        read_manifest(tmp_path)


# --- the step log ---------------------------------------------------------------------------------

STEP = {
    "sizes": [[32, 2]],
    "step": 0,
    "epoch": 0,
    "first": 0,
    "ends_epoch": False,
    "version": 0,
    "shares": [],
}


def logged_step(**changes: object) -> bytes:
    """A record whose hash is right; None takes a field away."""
    honest = {"version": 0, "step": STEP, "cut": files.honest_facts()["cut"], "loss_sum": 1.0}
    record = {key: value for key, value in (honest | changes).items() if value is not None}
    return files.logged(msgspec.json.encode(record), b"")


def replayed(data: bytes, applied: list[object]) -> None:
    disk = files.disk_with({"steps-1-1-000000000.log": data})
    restore(
        files.journal_of(disk), lambda kept: None, lambda step, record, body: applied.append(step), "mine"
    )


LOGGED = {
    "no JSON": files.logged(b"\x00", b""),
    "no record": files.logged(b"[]", b""),
    "no version": logged_step(version=None),
    "a version that is a word": logged_step(version="zero"),
    "no loss": logged_step(loss_sum=None),
    "no cut": logged_step(cut=None),
    "more batches than there are": logged_step(step=STEP | {"sizes": [[32, 2**40]]}),
}


@pytest.mark.parametrize("case", LOGGED)
def test_a_step_log_with_right_hashes_and_nonsense_is_refused_with_a_sentence(case):
    applied: list[object] = []
    with pytest.raises(StorageError, match="step log cannot be used"):
        replayed(LOGGED[case], applied)


def test_an_honest_step_log_is_replayed():
    applied: list[object] = []
    replayed(logged_step(), applied)
    assert len(applied) == 1


# --- what a learner knows -------------------------------------------------------------------------


def random_state(change: dict[str, object]) -> dict[str, bytes]:
    """An honest checkpoint, but for what it says of numpy's generator."""
    facts = msgspec.json.decode(files.honest_files()["learner.json"])
    for key, value in facts["random"]["dict"]:
        if key == "numpy":
            value["dict"] = [[name, change.get(name, kept)] for name, kept in value["dict"]]
    return files.honest_files() | {"learner.json": msgspec.json.encode(facts)}


@pytest.mark.parametrize("position", [-1, 625, 2**20, 2**40, {"float": "nan"}, "7"])
def test_a_generator_that_points_beyond_its_own_memory_is_refused(position):
    assert files.check_learner_files(random_state({"pos": 624}))
    assert not files.check_learner_files(random_state({"pos": position}))


def test_a_number_too_large_for_what_it_is_called_is_refused():
    assert not files.check_learner_files(random_state({"gauss": {"float": 10**400}}))


# --- weights --------------------------------------------------------------------------------------

WEIGHTS = {
    "a side that no tensor has": {"a": {"dtype": "F32", "shape": [0, 2**63], "data_offsets": [0, 0]}},
    "strides beyond counting": {"a": {"dtype": "F32", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}},
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_that_torch_cannot_hold_are_not_exported_and_told_so(case, tmp_path):
    CheckpointStore(RealDisk(tmp_path)).save(
        1, {"model.safetensors": [files.safetensors(WEIGHTS[case])]}, files.honest_facts()
    )
    with pytest.raises(StorageError, match="cannot be read"):
        export_run(tmp_path, "pt", tmp_path / "out.pt")


# --- batches --------------------------------------------------------------------------------------


def test_no_byte_of_a_body_becomes_two_tensors():
    body = bytearray(1024)
    whole = TensorAt("uint8", (1024,), 0)
    with pytest.raises(RemoteProtocolError, match="more than their body"):
        unpack(ListOf([whole] * 1000), body)


def test_several_batches_share_what_their_body_has():
    unpacker = Unpacker(bytearray(64))
    assert unpacker.unpack(TensorAt("float32", (8,), 0)).tolist() == [0.0] * 8
    assert unpacker.unpack(TensorAt("float32", (8,), 0), 32).tolist() == [0.0] * 8
    with pytest.raises(RemoteProtocolError, match="more than their body"):
        unpacker.unpack(TensorAt("uint8", (1,), 0))


# --- messages that grow ---------------------------------------------------------------------------


def grown(meta: bytes, limits: Limits) -> int:
    """What a refused message took at most."""
    refused: list[Exception | None] = []
    data = memoryview(around(meta))
    peak = peak_bytes(lambda: refused.append(refusal_of(lambda: feed(Decoder(limits), data))))
    assert refused[0] is not None
    return peak


def test_a_strangers_message_never_becomes_a_batch():
    lists = b"\x92\xa1l\xdc\x03\xca" + b"\x92\xa1l\x90" * 970
    loans = b"\x91\x97\x0b\x00\x00\x01\x04\x20\x91\x94\x00\x20\x00" + lists
    meta = b"\x83\xa4type\xa4work\xa7version\x00\xa5loans" + loans
    assert len(meta) <= GREETING_LIMITS.meta_bytes_max
    assert grown(meta, GREETING_LIMITS) < 16 * KIB


def test_half_a_million_answers_of_two_bytes_are_refused_before_they_are_made():
    answers = b"\xdd\x00\x07\xa1\x20" + b"\x91\x00" * 500_000
    meta = b"\x83\xa4type\xa6update\xa7version\x00\xa7answers" + answers
    # The message itself is held, and nothing of what it would become.
    assert grown(meta, Limits(MIB, 0)) < MIB + 512 * KIB


def test_what_is_absent_is_no_more_than_what_was_lent():
    """A mebibyte of it would become ten; for one lease of a small model there is no such message."""
    layout = Layout([Entry("weight", "float32", (4, 4), TRAINED), Entry("bias", "float32", (4,), TRAINED)])
    limits = update_limits(1, layout, 128)
    absent = b"\xdd\x00\x0f\xf0\x00" + b"\x01" * 0xFF000
    answers = b"\x91\x94\x00\xca\x00\x00\x00\x00\xca\x00\x00\x00\x00" + absent
    meta = b"\x83\xa4type\xa6update\xa7version\x00\xa7answers" + answers
    assert grown(meta, limits) < 256 * KIB
    # As much of it as fits takes next to nothing; what an honest node may say does fit.
    few = answers.replace(absent, b"\xdd\x00\x00\x30\x00" + b"\x01" * 0x3000)
    taken: list[object] = []
    data = memoryview(around(b"\x83\xa4type\xa6update\xa7version\x00\xa7answers" + few))
    assert peak_bytes(lambda: taken.append(feed(Decoder(limits), data))) < 256 * KIB
    longest = Answer(2**61, 1.5, 1.5, [0, 1], failure="\U0001f34e" * 2000, codec="bf16 | shuffle | zstd:19")
    for leases in (1, 100):
        update = Update(2**61, [longest] * leases)
        [(heard, _)] = feed(Decoder(update_limits(leases, layout, 128)), memoryview(encode(update)))
        assert heard == update


# --- words that are shown -------------------------------------------------------------------------

ESCAPES = "\x1b[2J\x1b]0;mine\x07 a\nb\r\u202egpj.exe\x9b31m"


def test_a_strangers_words_do_not_move_the_cursor():
    stream = io.StringIO()
    View(Settings(), stream).say(f"apple was refused: {ESCAPES}")
    assert all(line.isprintable() for line in stream.getvalue().split("\n"))
    assert all(line.isprintable() for line in RemoteProtocolError(ESCAPES, why=ESCAPES).lines())


@pytest.mark.parametrize("name", ["step", "optimizer", "get_lr", "__init__", "load_state_dict"])
def test_a_schedulers_state_takes_the_place_of_no_method(name):
    facts = msgspec.json.decode(files.honest_files()["learner.json"])
    facts["scheduler_state"]["dict"].append([name, 7])
    assert not files.check_learner_files(files.honest_files() | {"learner.json": msgspec.json.encode(facts)})
