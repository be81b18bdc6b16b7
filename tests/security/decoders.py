"""What must hold of every decoder that reads bytes of a peer: a value, or the peer's error, and nothing else.

Each function here takes bytes and raises `Broken` (or whatever escaped the decoder) if it does not hold. None
uses `assert`: `python -O` runs them too.
"""

from __future__ import annotations

import io
import tokenize
import warnings
import zlib
from collections import UserDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from tests.protocol.streams import around
from tests.security.measure import Broken, refusal_of, require
from w5xde import Job
from w5xde.compression import parse_spec
from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.receiver import CodecReceiver
from w5xde.learn.data.batch_types import BatchTypes
from w5xde.learn.data.payload import unpack
from w5xde.learn.data.samples import ByteRows, Numbers, SampleFormat
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.model.layout import Blueprint, DtypeGroup, FlatModel, describe, differences
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.trust.canary import compute_canary
from w5xde.learn.trust.sketch import ROW
from w5xde.message_types import Item
from w5xde.messages import (
    TRAINED,
    Batch,
    Canary,
    Entry,
    Layout,
    Message,
    Offer,
    Rules,
    SampleList,
    Update,
    Welcome,
    Work,
)
from w5xde.protocol.session import CHECKING, CLOSED, COORDINATOR, GREETED, NEW, NODE, WORKING, Session
from w5xde.protocol.wire import Decoder, Frame, Limits, encode
from w5xde.runtime.node.listed_batches import ListedBatches
from w5xde.runtime.node.sample_cache import SampleCache
from w5xde.ticket import PREFIX, Secret, Ticket
from w5xde.ticket import parse as parse_ticket

# --- frames ---------------------------------------------------------------------------------------


class Heard(NamedTuple):
    """What came out of a stream: frames, and the error that ended it."""

    frames: list[tuple[Message, bytes]]
    error: str


def hear(data: bytes, cuts: Iterable[int], limits: Limits) -> Heard:
    """Read a stream that arrives in pieces; after an error nothing more may come out of it."""
    decoder = Decoder(limits)
    found: list[tuple[Message, bytes]] = []
    for start, stop in pairwise([0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]):
        at = start
        while at < stop:
            buffer = decoder.get_buffer()
            require(len(buffer) > 0, "the decoder waits for bytes and has no room for any")
            count = min(len(buffer), stop - at)
            buffer[:count] = data[at : at + count]
            at += count
            try:
                frames = decoder.buffer_updated(count)
            except RemoteProtocolError as error:
                require(error.code.startswith("W5-1"), f"a refusal without a code: {error.code}")
                _stays_silent(decoder)
                return Heard(found, error.what)
            found += [_kept(frame, limits) for frame in frames]
    return Heard(found, "")


def _kept(frame: Frame, limits: Limits) -> tuple[Message, bytes]:
    require(len(frame.body) <= limits.body_bytes_max, "a body beyond the limit")
    return frame.message, bytes(frame.body)


def _stays_silent(decoder: Decoder) -> None:
    valid = encode(msgspec.msgpack.decode(b"\x81\xa4type\xa4beat", type=Message))
    for _ in range(2):
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(valid))
        buffer[:count] = valid[:count]
        try:
            frames = decoder.buffer_updated(count)
        except RemoteProtocolError:
            continue
        raise Broken(f"after an error the stream still gave {frames}")


def check_stream(data: bytes, cuts: list[int], limits: Limits) -> Heard:
    """However it is cut, a stream says the same."""
    whole = hear(data, (), limits)
    for pieces in (hear(data, cuts, limits), hear(data, range(len(data)), limits)):
        require(pieces.error == whole.error, f"in pieces: {pieces.error!r}, as a whole: {whole.error!r}")
        # What came in one read with an error is not believed; in pieces it came before.
        same = pieces.frames[: len(whole.frames)] if whole.error else pieces.frames
        require(same == whole.frames, "pieces of a stream gave other frames than the whole")
    return whole


# --- messages -------------------------------------------------------------------------------------

_STATES = [NEW, GREETED, CHECKING, WORKING, CLOSED]


def check_message(meta: bytes, limits: Limits) -> None:
    """A message is refused, or is what it says it is; whoever hears it may go on or part."""
    heard = hear(around(meta), (), limits)
    for message, body in heard.frames:
        again = hear(encode(message), (), limits)
        require(not again.error, f"we would not read our own words: {again.error}")
        # A NaN differs from itself, so bytes are compared and not messages.
        require(encode(again.frames[0][0]) == encode(message), "a message changed on its way")
        for side in (NODE, COORDINATOR):
            for state in _STATES:
                session = Session(side)
                session.state = state
                refusal_of(partial(session.hear, message, len(body)))
        _use(message)


def _use(message: Message) -> None:
    """What the receiver looks at before anything is computed."""
    if isinstance(message, Work):
        for batch in (batch for loan in message.loans for batch in loan.batches):
            check_item(batch.item, bytearray(64), batch.at)
            if batch.listed is not None:
                _check_list(batch, batch.listed)
    elif isinstance(message, Welcome):
        differences(message.layout, LAYOUT)
        differences(LAYOUT, message.layout)
        if message.canary is not None:
            check_canary(message.canary, bytearray(range(256)))
    elif isinstance(message, Update):
        for answer in message.answers:
            body = memoryview(bytearray(min(answer.body_bytes, 300)))
            for setting in SETTINGS:
                refusal_of(partial(_receiver(setting).decode, answer.codec, body))


def _check_list(batch: Batch, listed: SampleList) -> None:
    """A node puts a listed batch together, misses samples, or refuses it."""
    form = SampleFormat.of(batch.item, batch.samples)
    rules = Rules(
        "sync", 0, "fp32", 1, "cached", data_samples=100, sample_bytes=form.sample_bytes if form else 4
    )
    # A node takes no batch that is larger than its memory.
    if form is None or batch.samples * form.sample_bytes <= 2**16:
        reader = ListedBatches(_NoCache(rules.sample_bytes), rules, bytearray(64))
        refusal_of(partial(reader.read, batch, listed))


class _NoCache(SampleCache):
    """A cache that holds nothing, and has no file."""

    def __init__(self, sample_bytes: int) -> None:
        self._sample_bytes = sample_bytes

    def read(self, numbers: Numbers) -> tuple[ByteRows, ByteRows]:
        return np.zeros((len(numbers), self._sample_bytes), np.uint8), np.zeros((len(numbers), 16), np.uint8)

    def write(self, numbers: Numbers, rows: ByteRows, hashes: ByteRows) -> bool:
        return True

    def discard(self, numbers: Numbers) -> None:
        """There is nothing."""


# --- canaries -------------------------------------------------------------------------------------


def a_model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@lru_cache(1)
def a_trainer() -> Trainer:
    """A node's, with two parameters of each layer and three buffers that travel."""
    module = a_model()
    layout = describe(module, {"1.running_mean", "1.running_var", "1.num_batches_tracked"})
    rules = Rules(mode="sync", seed=7, precision="fp32", threads=1, data="stream")
    cpu = torch.device("cpu")
    job = Job(model=a_model, data=list, loss=lambda net, batch: net(batch).sum(), optimizer=torch.optim.SGD)
    return Trainer(job, FlatModel(module, layout, cpu), rules, cpu)


def check_canary(canary: Canary, body: bytearray) -> None:
    """A canary gives as many numbers as the node's own model says, or is refused, or says why it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given = compute_canary(a_trainer(), canary, body)
        except RemoteProtocolError:
            return
        except JoinError as error:
            require(error.code == "W5-212", f"refused with {error.code}: {error.what}")
            return
    require(given.rows.shape == (5, ROW), f"an answer of {tuple(given.rows.shape)}")


# --- batches --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two parts of a batch."""

    left: Any
    right: Any


@dataclass
class Plain:
    """Two parts of a batch; nothing may run its constructor."""

    left: Any
    right: Any

    def __post_init__(self) -> None:
        raise RuntimeError("a constructor ran")


class Mapping(UserDict[str, Any]):
    """A dict with methods of its own."""


TYPES = BatchTypes({":Pair": Pair, ":Plain": Plain, ":Mapping": Mapping})


def check_item(item: Item, body: bytearray, offset: int) -> None:
    """A batch holds no more than its body has."""
    built: list[Any] = []
    with warnings.catch_warnings():
        # torch's own news (a dtype that is experimental) are not the peer's doing.
        warnings.simplefilter("ignore")
        refused = refusal_of(lambda: built.append(unpack(item, body, offset, TYPES)))
    if refused is None:
        held = sum(tensor.nbytes for tensor in _tensors(built))
        require(held <= len(body), f"tensors of {held} bytes were made of {len(body)}")


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, (dict, UserDict)):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Plain):
        yield from _tensors([value.left, value.right])
    else:
        # What a name chose beside those: only what the wire can say plainly.
        require(isinstance(value, (int, float, str, bytes, type(None))), f"a {type(value).__name__} was made")


# --- codecs ---------------------------------------------------------------------------------------

_COMPRESSORS = ["zlib:1", "lz4", "lz4:8", "lz4frame", "zstd:1"]
SPECS = [
    "none",
    "shuffle",
    *_COMPRESSORS,
    *(f"shuffle | {name}" for name in _COMPRESSORS),
    "fp16",
    "bf16",
    "int8",
    "int8 | zstd:1",
    "bf16 | shuffle | zstd:1",
    "fp16 | shuffle | lz4",
    "int8 | shuffle | zlib:1",
    "q4",
    "q4 | zstd:1",
]
SETTINGS = ["none", "auto", "auto:lossy", *SPECS[1:]]
LAYOUT = Layout(
    [
        Entry("weight", "float32", (9, 5), TRAINED),
        Entry("bias", "float64", (3,), TRAINED),
        Entry("half", "bfloat16", (7,), TRAINED),
        Entry("count", "int64", (2,), "moving"),
        Entry("seen", "bool", (5,), "moving"),
        Entry("weight/rows", "float32", (9,), "carried"),
        Entry("weight/mean", "float32", (9,), "averaged"),
    ]
)
_BLUEPRINT = Blueprint(LAYOUT)
GROUPS: list[DtypeGroup] = _BLUEPRINT.moving_groups
VECTOR_BYTES = _BLUEPRINT.moving_bytes


@lru_cache
def _receiver(setting: str) -> CodecReceiver:
    return CodecReceiver(setting, GROUPS, VECTOR_BYTES)


def encoded(spec: str, is_plain: bool) -> bytes:
    """An honest vector as it travels; a plain one is mostly zeros, and shrinks."""
    raw = torch.zeros(VECTOR_BYTES, dtype=torch.uint8)
    if not is_plain:
        raw.copy_(torch.arange(VECTOR_BYTES).mul(37).remainder(251))
    return b"".join(parse(spec).encode(raw, GROUPS))


def check_codec(spec: str, body: bytes) -> None:
    """A body becomes a vector of exactly the length that the layout says, or is refused with W5-122."""
    for setting in (spec, "auto:lossy"):
        try:
            vector = _receiver(setting).decode(spec, memoryview(bytearray(body)))
        except RemoteProtocolError as error:
            require(error.code == "W5-122", f"refused with {error.code}: {error.what}")
        else:
            require(vector.numel() == VECTOR_BYTES, "a vector of another length")


def check_spec(text: str) -> None:
    """A spec is understood, or a ValueError says why not; what the run did not agree on is refused."""
    with suppress(ValueError):
        parse_spec(text)
    refused = refusal_of(lambda: _receiver("none").decode(text, memoryview(bytearray(VECTOR_BYTES))))
    require(refused is not None or text == "none", f"{text!r} was never agreed on")


# --- tickets --------------------------------------------------------------------------------------

_FACTS: dict[str, Any] = {"id": bytes(range(8)), "secret": Secret(bytes(16)), "expires_at": 1_900_000_000}
_NEAR = (("192.168.1.20", 5555), ("fd00::1:2", 5555))
# One of each kind: pinned, in clear text, with a certificate of the user's own.
TICKETS = [
    Ticket(addresses=_NEAR, fingerprint=bytes(range(32)), **_FACTS),
    Ticket(addresses=(("a", 1),), fingerprint=b"", is_clear=True, **_FACTS),
    Ticket(addresses=(("gpu-1.lab.example.org", 65535),), fingerprint=b"", is_pki=True, **_FACTS),
]


ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def body_of(ticket: Ticket) -> bytes:
    """The bytes of a ticket without its checksum, decoded from its text."""
    value = 0
    digits = ticket.to_text().removeprefix(PREFIX)
    for digit in digits:
        value = value << 5 | ALPHABET.index(digit)
    length = len(digits) * 5 // 8
    return (value >> (len(digits) * 5 - length * 8)).to_bytes(length, "big")[:-4]


def sealed_ticket(body: bytes) -> str:
    """The text of any body with the right checksum, as another program would write it."""
    data = body + zlib.crc32(body).to_bytes(4, "big")
    characters = -(-len(data) * 8 // 5)
    value = int.from_bytes(data, "big") << (characters * 5 - len(data) * 8)
    return PREFIX + "".join(ALPHABET[value >> (5 * at) & 31] for at in reversed(range(characters)))


def as_ticket(body: bytes) -> str:
    """The text of any body with the right length and checksum, as another program would write it."""
    whole = bytearray(body)
    if len(whole) > 1:
        whole[1] = (len(whole) + 4) % 256
    return sealed_ticket(bytes(whole))


def check_ticket(text: str) -> None:
    """A text is a ticket that would be written just so, or is refused with W5-101."""
    try:
        ticket = parse_ticket(text)
    except JoinError as error:
        require(error.code == "W5-101", f"refused with {error.code}: {error.what}")
    else:
        require(parse_ticket(ticket.to_text()) == ticket, "a ticket changed on its way")


# --- code -----------------------------------------------------------------------------------------


def check_code(code: dict[str, bytes], more: bytes, *, is_honest: bool) -> None:
    """Files become a bundle that stays in its folder and is read as it is shown, or the peer's error."""
    bundle = CodeBundle("train.py", {name: code[name] for name in sorted(code)})
    offer = Offer(bundle.job, bundle.sizes, bundle.sha256 if is_honest else "0" * 64)
    try:
        taken = CodeBundle.from_offer(offer, bytearray(bundle.body + more))
    except RemoteProtocolError as error:
        require(error.code == "W5-120", f"a refusal with another code: {error.code}")
        return
    require(is_honest and not more, "code was taken that is not what was offered")
    require(taken == bundle, "code changed on its way")
    for name, content in taken.files.items():
        inside = (Path("/folder") / name).resolve()
        require(inside.is_relative_to("/folder") and inside.suffix == ".py", f"{name!r} leads elsewhere")
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        require(encoding.startswith("utf-8"), f"{name} is read as {encoding}")
