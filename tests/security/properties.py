"""The properties: what holds of any bytes, for every decoder. `make test` and `make fuzz` both run these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.protocol.streams import ROOMY, written
from tests.security import decoders, files, inputs
from tests.security.measure import MIB, core_seconds, peak_bytes, require
from w5xde.learn.model.layout import DTYPES
from w5xde.message_types import Bytes, DictOf, Item, ListOf, MappingOf, RecordOf, TensorAt, TupleOf, Value
from w5xde.protocol.wire import GREETING_LIMITS, Limits
from w5xde.runtime.node.limits import OFFER_LIMITS, WELCOME_LIMITS

# No deadline: another process on the same cores must not fail a test; time is measured where it matters.
PROFILE: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "phases": [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
}


@dataclass(frozen=True)
class Property:
    """One property, what it is tried on, and how many examples of it `make test` tries."""

    check: Callable[..., None]
    on: dict[str, Any]
    examples: int

    def run(self, examples: int | None = None) -> int:
        """Try examples until one fails; returns how many were tried."""
        tried = 0

        @wraps(self.check)
        def counted(**drawn: Any) -> None:
            nonlocal tried
            tried += 1
            self.check(**drawn)

        settings(max_examples=examples or self.examples, **PROFILE)(given(**self.on)(counted))()
        return tried

    def on_bytes(self) -> Callable[[bytes], object]:
        """The same for a fuzzer that has bytes: what is tried is drawn from them."""

        @wraps(self.check)
        def checked(**drawn: Any) -> None:
            self.check(**drawn)

        return settings(**PROFILE)(given(**self.on)(checked)).hypothesis.fuzz_one_input


PROPERTIES: dict[str, Property] = {}


def holds(examples: int, **on: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The function below must hold of everything that is drawn."""

    def keep(check: Callable[..., None]) -> Callable[..., None]:
        PROPERTIES[check.__name__] = Property(check, on, examples)
        return check

    return keep


_limits = st.sampled_from([GREETING_LIMITS, ROOMY, WELCOME_LIMITS, OFFER_LIMITS, Limits(2**26, 2**36)])

# --- frames and messages --------------------------------------------------------------------------


@holds(2500, data=st.binary(max_size=200), is_ours=st.booleans(), cuts=inputs.cuts, limits=_limits)
def any_bytes_as_a_stream(data, is_ours, cuts, limits):
    decoders.check_stream((b"W5\x01\x00" if is_ours else b"") + data, cuts, limits)


@holds(1200, frames=inputs.frames, edits=inputs.edits, cuts=inputs.cuts, limits=_limits)
def a_damaged_stream(frames, edits, cuts, limits):
    decoders.check_stream(inputs.edited(written(frames), edits), cuts, limits)


@holds(300, frames=inputs.frames, cuts=inputs.cuts)
def a_sound_stream(frames, cuts):
    heard = decoders.check_stream(written(frames), cuts, ROOMY)
    require(not heard.error, f"honest frames were refused: {heard.error}")
    require(heard.frames == [(word, bytes(body)) for word, body in frames], "frames changed on their way")


@holds(1700, meta=inputs.metas, edits=inputs.edits, limits=_limits)
def a_damaged_message(meta, edits, limits):
    decoders.check_message(inputs.edited(meta, edits), limits)


@holds(1500, word=inputs.words, changes=inputs.changes, limits=_limits)
def any_value_in_any_field(word, changes, limits):
    for path, value in changes:
        word = inputs.changed(word, path, value)
    decoders.check_message(msgspec.msgpack.encode(word), limits)


# --- code -----------------------------------------------------------------------------------------

_names = st.sampled_from(["train.py", "lib/a.py", "LIB/b.py", "json.py"]) | st.text(
    alphabet="aA./\\\0py", max_size=9
)
_contents = st.binary(max_size=9) | st.sampled_from([b"# coding: utf-7\n", b"x = 1\n"])


@holds(
    1000,
    files=st.dictionaries(_names, _contents, max_size=4),
    is_honest=st.booleans(),
    more=st.binary(max_size=2),
)
def any_files_as_code(files, is_honest, more):
    decoders.check_code({"train.py": b"x = 1\n", **files}, more, is_honest=is_honest)


# --- batches --------------------------------------------------------------------------------------

_sizes = st.integers(0, 9) | st.sampled_from([255, 2**31, 2**32, 2**61, 2**62 - 1])
_tensors = st.builds(
    TensorAt,
    st.sampled_from(["float32", "int64", "uint8"]) | st.sampled_from([*DTYPES, "object", ""]),
    st.lists(_sizes, max_size=4).map(tuple) | st.integers(0, 64).map(lambda count: (1,) * count),
    st.integers(0, 80) | st.sampled_from([2**31, 2**62 - 1]),
    st.booleans(),
)
_keys = st.none() | st.booleans() | st.integers(0, 9) | st.floats() | st.text(max_size=3)
_kinds = st.sampled_from(
    [":Pair", ":Plain", ":Mapping", "collections:UserDict", "os:system", "builtins:type"]
)
_fields = st.just(["left", "right"]) | st.lists(st.sampled_from(["left", "right", "__class__"]), max_size=3)
_items: st.SearchStrategy[Item] = st.recursive(
    _tensors | st.builds(Value, inputs.scalars) | st.builds(Bytes, st.binary(max_size=4)),
    lambda inner: (
        st.builds(ListOf, st.lists(inner, max_size=4))
        | st.builds(TupleOf, st.lists(inner, max_size=4))
        | st.builds(DictOf, st.lists(_keys, max_size=3), st.lists(inner, max_size=3))
        | st.builds(RecordOf, _kinds, _fields, st.lists(inner, max_size=3))
        | st.builds(MappingOf, _kinds, st.lists(_keys, max_size=3), st.lists(inner, max_size=3))
    ),
    max_leaves=6,
)


@holds(1300, item=_items, body=st.binary(max_size=80), offset=st.integers(0, 90))
def any_batch(item, body, offset):
    decoders.check_item(item, bytearray(body), offset)


# --- codecs ---------------------------------------------------------------------------------------

_HONEST = {
    (spec, is_plain): decoders.encoded(spec, is_plain)
    for spec in decoders.SPECS
    for is_plain in (True, False)
}
_honest = st.sampled_from([*_HONEST])


@holds(2500, honest=_honest, edits=inputs.edits)
def a_damaged_vector(honest, edits):
    decoders.check_codec(honest[0], inputs.edited(_HONEST[honest], edits))


@holds(2500, spec=st.sampled_from(decoders.SPECS), body=st.binary(max_size=400))
def any_bytes_as_a_vector(spec, body):
    decoders.check_codec(spec, body)


@holds(1500, spec=st.sampled_from(decoders.SPECS), other=_honest, more=_honest, times=st.integers(0, 3))
def vectors_joined_or_taken_for_another(spec, other, more, times):
    decoders.check_codec(spec, _HONEST[other] + _HONEST[more] * times)


@holds(
    1000,
    text=st.text(max_size=20) | st.lists(st.sampled_from([*"|: 1-", "zstd", "int8", "lz4"])).map("".join),
)
def any_text_as_a_spec(text):
    decoders.check_spec(text)


# --- files ----------------------------------------------------------------------------------------


def _learner_files(**replaced: bytes) -> dict[str, bytes]:
    names = {"learner": "learner.json", "model": "model.safetensors", "training": "training.safetensors"}
    return files.honest_files() | {names[key]: data for key, data in replaced.items()}


@holds(400, changes=inputs.json_changes)
def any_value_in_a_learners_facts(changes):
    facts = msgspec.json.decode(files.honest_files()["learner.json"])
    for path, value in changes:
        facts = inputs.changed(facts, path, value)
    files.check_learner_files(_learner_files(learner=msgspec.json.encode(facts)))


@holds(
    400,
    name=st.sampled_from(["learner.json", "model.safetensors", "training.safetensors"]),
    edits=inputs.edits,
)
def a_damaged_file_of_a_learner(name, edits):
    whole = files.honest_files()
    # Most of a file is plain numbers: what says where they are comes first.
    head = 8 + int.from_bytes(whole[name][:8], "little") if name.endswith("safetensors") else len(whole[name])
    data = inputs.edited(whole[name][:head], edits) + whole[name][head:]
    files.check_learner_files(whole | {name: data})


_dtypes = st.sampled_from(["F32", "F64", "BF16", "BOOL", "F8_E5M2", "F4", "C64", "I64", "X", ""])
_offsets = st.lists(st.integers(0, 40) | st.sampled_from([2**63, 2**64 - 1, -1]), min_size=2, max_size=2)
_shapes = st.lists(st.integers(0, 5) | st.sampled_from([2**32, 2**62, 2**63, 2**64]), max_size=4)
_listed = st.fixed_dictionaries({"dtype": _dtypes, "shape": _shapes, "data_offsets": _offsets})
_headers = st.dictionaries(st.sampled_from(["weight", "bias", "__metadata__", ""]), _listed, max_size=3)


@holds(100, header=_headers, data=st.binary(max_size=40))
def any_header_of_tensors(header, data):
    files.check_learner_files(_learner_files(model=files.safetensors(header, data)))
    files.check_weights(files.safetensors(header, data))


@holds(500, changes=inputs.json_changes)
def any_value_in_a_manifest(changes):
    held = {"model.safetensors": b"abc"}
    manifest = files.honest_manifest(held)
    for path, value in changes:
        manifest = inputs.changed(manifest, path, value)
    files.check_checkpoint(files.manifest_of(manifest), held)


@holds(500, edits=inputs.edits, is_sealed=st.booleans())
def a_damaged_manifest(edits, is_sealed):
    held = {"model.safetensors": b"abc"}
    content = msgspec.json.encode(files.honest_manifest(held))
    if is_sealed:
        files.check_checkpoint(files.sealed_manifest(inputs.edited(content, edits)), held)
    else:
        files.check_checkpoint(inputs.edited(files.sealed_manifest(content), edits), held)


_HEAD = {"kind": "segment", "number": 1, "after": files.NOTHING, "records": 0, "life": 1}
_RECORDS = [
    _HEAD,
    {"kind": "start", "incarnation": 1, "run": "mine", "plan": {}, "resumed": False},
    {"kind": "joined", "node": "apple", "text": "apple joined"},
    {"kind": "lend", "node": "apple", "version": 0, "leases": [[7, 0, 0, 2]]},
    {"kind": "step", "step": 0, "version": 0, "epoch": 0, "first": 0, "sizes": [[32, 2]], "ends_epoch": True,
     "shares": [[0, 2, "apple", 7]]},
    {"kind": "epoch", "epoch": 1, "aside": [], "text": "epoch 1 is complete"},
    {"kind": "checkpoint", "version": 1, "sha256": files.NOTHING},
    {"kind": "stop", "reason": "epoch_limit"},
]  # fmt: skip


@holds(500, changes=inputs.ledger_changes, times=st.integers(1, 2))
def any_value_in_a_ledger(changes, times):
    # Known gap: the audit builds as many numbers as a record counts, and a ledger may count to 2^63.
    records = _RECORDS
    for path, value in changes:
        records = inputs.changed(records, path, value)
    lines = records if isinstance(records, list) else [records]
    files.check_ledger([files.ledger_of(map(msgspec.json.encode, lines))] * times)


@holds(500, edits=inputs.edits, line=st.integers(0, 7), is_sealed=st.booleans())
def a_damaged_ledger(edits, line, is_sealed):
    lines = [msgspec.json.encode(record) for record in _RECORDS]
    if is_sealed:
        lines[line] = inputs.edited(lines[line], edits)
        files.check_ledger([files.ledger_of(lines)])
    else:
        files.check_ledger([inputs.edited(files.ledger_of(lines), edits)])


@holds(1500, line=st.binary(max_size=200), before=st.text(max_size=64))
def any_bytes_as_a_sealed_line(line, before):
    files.check_seal(line, before)


_STEP = {"version": 0, "step": _RECORDS[4], "cut": {}, "absent": [], "loss_sum": 1.0}


@holds(500, changes=inputs.json_changes, body=st.binary(max_size=20))
def any_value_in_a_step_log(changes, body):
    record: Any = _STEP | {"cut": files.honest_facts()["cut"]}
    for path, value in changes:
        record = inputs.changed(record, path, value)
    files.check_step_log(files.logged(msgspec.json.encode(record), body) * 2)


@holds(500, edits=inputs.edits, is_sealed=st.booleans())
def a_damaged_step_log(edits, is_sealed):
    header = msgspec.json.encode(_STEP | {"cut": files.honest_facts()["cut"]})
    if is_sealed:
        files.check_step_log(files.logged(inputs.edited(header, edits), b"body"))
    else:
        files.check_step_log(inputs.edited(files.logged(header, b"body") * 2, edits))


@holds(500, data=st.binary(max_size=60) | inputs.json_anything.map(msgspec.json.encode))
def any_bytes_as_what_a_run_was_started_with(data):
    files.check_run_manifest(data)


# --- tickets --------------------------------------------------------------------------------------

_tickets = st.sampled_from(decoders.TICKETS)


@holds(500, text=st.text(max_size=150), is_ours=st.booleans())
def any_text_as_a_ticket(text, is_ours):
    decoders.check_ticket("w5" + text if is_ours else text)


@holds(500, ticket=_tickets, edits=inputs.edits)
def a_damaged_ticket(ticket, edits):
    decoders.check_ticket(inputs.edited(ticket.to_text().encode(), edits).decode("latin-1"))


@holds(700, ticket=_tickets, edits=inputs.edits)
def a_ticket_that_another_program_made(ticket, edits):
    decoders.check_ticket(decoders.as_ticket(inputs.edited(decoders.body_of(ticket), edits)[:200]))


@holds(300, changes=inputs.json_changes)
def any_value_in_a_register_of_tickets(changes):
    book = msgspec.json.decode(files.honest_register())
    for path, value in changes:
        book = inputs.changed(book, path, value)
    files.check_register(files.sealed_manifest(msgspec.json.encode(book)))


# --- memory and time ------------------------------------------------------------------------------

# A refusal keeps its traceback, and hypothesis what it has drawn: that is not what grows.
_SLACK_BYTES = 64 * 1024
_MILLISECONDS_A_KIB = 1e-3


@holds(200, frames=inputs.frames, edits=inputs.edits, limits=_limits)
def a_damaged_stream_takes_little(frames, edits, limits):
    data = inputs.edited(written(frames), edits)
    scratch = limits.meta_bytes_max if data[:2] == b"W5" else 0
    peak = peak_bytes(lambda: decoders.hear(data, (), limits))
    require(peak <= 2 * 65536 + min(scratch, 64 * MIB) + 40 * len(data) + _SLACK_BYTES, f"{peak} bytes")
    seconds = core_seconds(lambda: decoders.hear(data, (), limits))
    require(
        seconds <= 0.05 + _MILLISECONDS_A_KIB * len(data) / 1024, f"{seconds:.3f} s for {len(data)} bytes"
    )


@holds(200, honest=_honest, edits=inputs.edits)
def a_damaged_vector_takes_little(honest, edits):
    body = inputs.edited(_HONEST[honest], edits)
    peak = peak_bytes(lambda: decoders.check_codec(honest[0], body))
    require(peak <= decoders.VECTOR_BYTES + 1 * MIB, f"{peak} bytes for a vector of {decoders.VECTOR_BYTES}")
