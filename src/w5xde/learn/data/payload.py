"""Batches as bytes: any nesting of dicts, lists and tuples with tensors, numbers and strings.

Tensors of every dtype are sent as they are; a value that cannot be sent is refused, with its name. Nothing
that arrives is executed: a description says where each tensor lies in the body, and its limits are checked.
Named tuples, dataclasses and UserDicts keep their types, as far as both sides know them (`batch_types.py`).
Knows no sockets and no data sets.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from w5xde.errors import JobError, RemoteProtocolError
from w5xde.learn.data.batch_types import NO_TYPES, BatchTypes
from w5xde.learn.model.containers import (
    extra_attributes,
    make_mapping,
    make_record,
    record_fields,
    record_parts,
)
from w5xde.learn.model.layout import DTYPES, dtype_name
from w5xde.message_types import (
    Bytes,
    Call,
    Container,
    DictOf,
    Item,
    ListOf,
    MappingOf,
    RecordOf,
    SampleList,
    TensorAt,
    TupleOf,
    Value,
)

# The size of complex128, the largest dtype: torch reads a tensor only from an address that its size divides.
ALIGNMENT_BYTES = 16
# Deeper than any real batch, and far below the depth of recursion that Python allows.
DEPTH_MAX = 32
_ITEMS = msgspec.msgpack.Decoder(Item)
_UNKNOWN = "and that type is not known to the job"
_UNKNOWN_TYPE = {
    "code": "W5-258",
    "why": "a node makes only those types that its own job file defines or imports, whatever it is sent",
    "fix": "define the type at the top level of the job file, or import it there",
}
# Torch reads these from a buffer directly; tensors of other dtypes are read as bytes and then viewed.
_DIRECT = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}


@dataclass(slots=True)
class Packed:
    """A batch that is ready to be sent."""

    samples: int
    item: Item
    pieces: list[memoryview]
    body_bytes: int
    # For a node that keeps samples: its samples by number; the pieces are those of samples it lacks.
    listed: SampleList | None = None
    # A part of a call of a pool: how it is computed.
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class UnreadableBatch:
    """In place of a batch that cannot be read or sent: why."""

    reason: str


# A batch that was read, or why it cannot be.
ReadBatch: TypeAlias = Packed | UnreadableBatch


def pack_batch(samples: int, value: Any, types: BatchTypes = NO_TYPES) -> Packed:
    packer = Packer(types)
    item = packer.pack(value)
    return Packed(samples, item, packer.pieces, packer.body_bytes)


class Shipped(NamedTuple):
    """A packed batch on its way from one process of a program to another: bytes alone, whatever its types."""

    samples: int
    item: bytes
    body: Tensor


def ship(packed: Packed) -> Shipped:
    body = torch.empty(packed.body_bytes, dtype=torch.uint8)
    room, at = body.numpy(), 0
    for piece in packed.pieces:
        room[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return Shipped(packed.samples, msgspec.msgpack.encode(packed.item), body)


def unship(shipped: Shipped) -> Packed:
    """The batch as it was packed: a piece for each tensor, and for what lies between two of them."""
    item, body = _ITEMS.decode(shipped.item), shipped.body.numpy().data
    pieces = []
    for leaf in leaves_of(item):
        if isinstance(leaf, TensorAt):
            end = leaf.offset + math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
            pieces.append(body[leaf.offset : end])
            if padding_of(end - leaf.offset):
                pieces.append(body[end : end + padding_of(end - leaf.offset)])
    return Packed(shipped.samples, item, pieces, len(body))


def leaves_of(item: Item, depth: int = 0) -> list[Item]:
    """The tensors and plain values of a batch, in order."""
    if isinstance(item, Container) and depth <= DEPTH_MAX:
        return [leaf for part in item.items for leaf in leaves_of(part, depth + 1)]
    return [item]


class Packer:
    """Collects the tensors of one or more batches, made of these types, into one body."""

    def __init__(self, types: BatchTypes = NO_TYPES) -> None:
        self._types = types
        self.pieces: list[memoryview] = []
        self.body_bytes = 0

    def pack(self, value: Any, where: str = "the batch", depth: int = 0) -> Item:
        """Describe a value and keep its tensors' bytes."""
        if isinstance(value, Tensor):
            return self._pack_tensor(value, where)
        if depth > DEPTH_MAX:
            raise _unsendable(where, f"lists or dicts nested more than {DEPTH_MAX} deep")
        kind = type(value)
        if kind in (list, tuple):
            items = [self.pack(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
            return ListOf(items) if kind is list else TupleOf(items)
        if isinstance(value, Mapping):
            keys = [_plain(key, where, is_key=True) for key in value]
            items = [self.pack(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()]
            name = self._types.name_of(kind) if isinstance(value, UserDict) else None
            return DictOf(keys, items) if name is None else MappingOf(name, keys, items)
        fields = record_fields(kind)
        if fields is not None:
            return self._pack_record(value, fields, where, depth)
        is_numpy = isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, float)
        if is_numpy and value.dtype.kind in "biufc":
            return self._pack_tensor(torch.as_tensor(np.asarray(value)), where)
        if isinstance(value, bytes):
            return Bytes(bytes(value))
        return Value(_plain(value, where))

    def _pack_record(self, value: Any, fields: tuple[str, ...], where: str, depth: int) -> RecordOf:
        name = self._types.name_of(type(value))
        if name is None:
            raise JobError(f"{where} is a {_called(type(value))}, {_UNKNOWN}", **_UNKNOWN_TYPE)
        more = extra_attributes(value)
        if more:
            what = f"a {_called(type(value))} with attributes that are no fields ({min(more)})"
            raise _unsendable(where, what)
        items = [
            self.pack(part, f"{where}.{field}", depth + 1)
            for field, part in zip(fields, record_parts(value), strict=True)
        ]
        return RecordOf(name, list(fields), items)

    def _pack_tensor(self, tensor: Tensor, where: str) -> TensorAt:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise _unsendable(where, f"a {tensor.layout} tensor")
        plain = tensor.detach().cpu().contiguous()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        at = self.body_bytes
        raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        self.pieces.append(raw.data)
        padding = padding_of(raw.nbytes)
        if padding:
            self.pieces.append(memoryview(bytes(padding)))
        self.body_bytes += raw.nbytes + padding
        return TensorAt(dtype_name(tensor.dtype), tuple(tensor.shape), at, tensor.requires_grad)


def padding_of(count: int) -> int:
    """The number of bytes between a tensor of `count` bytes and the next one, which must be aligned."""
    return -count % ALIGNMENT_BYTES


def _plain(value: Any, where: str, *, is_key: bool = False) -> bool | int | float | str | None:
    """A number or a string as Python's own type, also if its type is a subclass."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise _unsendable(where, f"{'a key' if is_key else 'an integer'} of more than 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise _unsendable(where, "a string that is not valid Unicode")
        return str.__str__(value)
    raise _unsendable(where, f"a {'key of type ' if is_key else ''}{_called(type(value))}")


def _called(kind: type) -> str:
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _unsendable(where: str, what: str) -> JobError:
    return JobError(
        f"{where} holds {what}, which cannot be sent",
        code="W5-203",
        why="batches are tensors, numbers and strings, or lists, tuples, dicts and dataclasses of them",
        fix="convert it to a tensor in the data set's __getitem__",
    )


def unpack(item: Item, body: bytearray | memoryview, offset: int = 0, types: BatchTypes = NO_TYPES) -> Any:
    """The value of the only batch in a body; its tensors share the body's memory (see `to_device`)."""
    return Unpacker(body, types).unpack(item, offset)


class Unpacker:
    """Builds the values that items describe from one body, with no more bytes in all than the body has."""

    def __init__(self, body: bytearray | memoryview, types: BatchTypes = NO_TYPES) -> None:
        """`types` are those of this process's own job."""
        self._body = body
        self._types = types
        # The trainer copies every tensor: an item that describes the same bytes many times would fill memory.
        self._left = len(body)

    def unpack(self, item: Item, offset: int = 0, depth: int = 0) -> Any:
        if isinstance(item, TensorAt):
            return self._tensor(item, offset)
        if isinstance(item, (Value, Bytes)):
            return item.value
        if depth > DEPTH_MAX:
            raise RemoteProtocolError(f"a batch nested more than {DEPTH_MAX} deep", code="W5-120")
        parts = [self.unpack(part, offset, depth + 1) for part in item.items]
        if isinstance(item, ListOf):
            return parts
        if isinstance(item, TupleOf):
            return tuple(parts)
        if isinstance(item, RecordOf):
            return self._record(item, parts)
        if len(item.keys) != len(parts):
            raise RemoteProtocolError("a dict with more keys than values, or fewer", code="W5-120")
        content = dict(zip(item.keys, parts, strict=True))
        kind = self._types.find(item.kind) if isinstance(item, MappingOf) else None
        # A type that is not known here arrives as an ordinary dict.
        return content if kind is None or UserDict not in kind.__mro__ else make_mapping(kind, content)

    def _record(self, item: RecordOf, parts: list[Any]) -> Any:
        kind = self._types.find(item.kind)
        if kind is None:
            what = f"a batch holds a {item.kind.removeprefix(':')}, {_UNKNOWN}"
            raise RemoteProtocolError(what, **_UNKNOWN_TYPE)
        if record_fields(kind) != tuple(item.fields) or len(parts) != len(item.fields):
            raise RemoteProtocolError(f"a {item.kind} with other fields than here", code="W5-120")
        return make_record(kind, parts)

    def _tensor(self, item: TensorAt, offset: int) -> Tensor:
        dtype = DTYPES.get(item.dtype)
        if dtype is None:
            raise RemoteProtocolError(f"a tensor of unknown dtype {item.dtype!r}", code="W5-120")
        count, start = math.prod(item.shape), offset + item.offset
        length = count * dtype.itemsize
        if start + length > len(self._body) or start % dtype.itemsize:
            raise _beyond(item)
        if length > self._left:
            raise RemoteProtocolError("tensors that take more than their body has", code="W5-120")
        self._left -= length
        if not count:
            tensor = _empty(item, dtype)
        # In the memory where it arrived; `to_device` copies it.
        elif dtype in _DIRECT:
            tensor = torch.frombuffer(self._body, dtype=dtype, offset=start, count=count)
        else:
            raw = torch.frombuffer(self._body, dtype=torch.uint8, offset=start, count=length)
            tensor = raw.view(dtype)
        if len(item.shape) != 1:
            tensor = tensor.view(item.shape)
        if item.requires_grad:
            if not (dtype.is_floating_point or dtype.is_complex):
                raise RemoteProtocolError(f"a {item.dtype} tensor that requires a gradient", code="W5-120")
            tensor.requires_grad_()
        return tensor


def _empty(item: TensorAt, dtype: torch.dtype) -> Tensor:
    # Torch computes the size of an empty tensor without its zeros, which must not overflow.
    if math.prod(size or 1 for size in item.shape) * dtype.itemsize >= 2**62:
        raise _beyond(item)
    return torch.empty(item.shape, dtype=dtype)


def _beyond(item: TensorAt) -> RemoteProtocolError:
    return RemoteProtocolError(f"a tensor of shape {item.shape} beyond the end of its body", code="W5-120")
