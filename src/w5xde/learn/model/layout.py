"""The model as one flat vector: every parameter and buffer is a view of one buffer of bytes.

    | trained parameters | moving buffers | frozen parameters | still buffers |
    |<-------- the moving part -------->|

Within each role entries of one dtype lie together, so that arithmetic on a whole role is one operation
per dtype. The moving part is what travels with every version; an update has the very same shape, with
gradients in place of parameters and differences in place of buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from w5xde.errors import JobError
from w5xde.learn.model.digest import same_bits
from w5xde.messages import FROZEN, MOVING, NAME_CHARACTERS_MAX, STILL, TRAINED, Entry, Layout, Role

# A cache line, so that no dtype's part starts in the middle of another's.
ALIGNMENT_BYTES = 64
_LAZY = (UninitializedParameter, UninitializedBuffer)
_ROLES = (TRAINED, MOVING, FROZEN, STILL)

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Group:
    """All entries of one role and dtype: `count` values from byte `start` on."""

    role: str
    dtype: torch.dtype
    start: int
    count: int
    entries: tuple[int, ...]


class Blueprint:
    """Where everything of a layout lies; the same on every machine, because it follows from the layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.offsets = [0] * len(layout.entries)
        self.groups: list[Group] = []
        at = 0
        self.moving_bytes = 0
        for role in _ROLES:
            members = [i for i, entry in enumerate(layout.entries) if entry.role == role]
            for name in dict.fromkeys(layout.entries[i].dtype for i in members):
                chosen = tuple(i for i in members if layout.entries[i].dtype == name)
                at = self._place(role, DTYPES[name], chosen, at)
            if role == TRAINED:
                # Where the moving buffers begin.
                self.trained_bytes = at
            if role == MOVING:
                self.moving_bytes = at
        self.whole_bytes = at
        self.moving_groups = [group for group in self.groups if group.role in (TRAINED, MOVING)]
        self.trained = [i for i, entry in enumerate(layout.entries) if entry.role == TRAINED]

    def _place(self, role: str, dtype: torch.dtype, chosen: tuple[int, ...], at: int) -> int:
        start, count = at, 0
        for i in chosen:
            self.offsets[i] = start + count * dtype.itemsize
            count += math.prod(self.layout.entries[i].shape)
        self.groups.append(Group(role, dtype, start, count, chosen))
        end = start + count * dtype.itemsize
        return -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def parts(self, raw: Tensor) -> list[Tensor]:
        """Typed views of the moving part's groups; of one vector, or of many that are rows."""
        return [
            raw[..., group.start : group.start + group.count * group.dtype.itemsize].view(group.dtype)
            for group in self.moving_groups
        ]

    def vectors(self, body: bytearray | memoryview, count: int) -> list[Vector]:
        """The vectors that lie one behind the other in these bytes, without copying them."""
        rows = (
            torch.frombuffer(body, dtype=torch.uint8).view(count, self.moving_bytes)
            if count and self.moving_bytes
            else torch.empty(count, self.moving_bytes, dtype=torch.uint8)
        )
        parts = [part.unbind(0) for part in self.parts(rows)]
        return [Vector(raw, [part[i] for part in parts]) for i, raw in enumerate(rows.unbind(0))]

    def new_vector(self, device: torch.device | str = "cpu") -> Vector:
        return Vector.over(torch.empty(self.moving_bytes, dtype=torch.uint8, device=device), self)


def differences(ours: Layout, theirs: Layout) -> list[str]:
    """How another layout departs from ours, in words."""
    found = []
    our_entries = {entry.name: entry for entry in ours.entries}
    their_entries = {entry.name: entry for entry in theirs.entries}
    for name, entry in our_entries.items():
        other = their_entries.get(name)
        if other is None:
            found.append(f"missing {name} {_shown(entry)}")
        elif _shown(other) != _shown(entry):
            found.append(f"{name} {_shown(other)}, expected {_shown(entry)}")
    found += [
        f"extra {name} {_shown(entry)}" for name, entry in their_entries.items() if name not in our_entries
    ]
    if not found and list(our_entries) != list(their_entries):
        found.append("the same parameters in another order")
    return found


def _shown(entry: Entry) -> str:
    kind = {TRAINED: "", FROZEN: " frozen", MOVING: " buffer", STILL: " buffer"}[entry.role]
    return f"{tuple(entry.shape)} {entry.dtype}{kind}"


class Vector:
    """One update: raw bytes and, for arithmetic, one typed view for each group of the moving part."""

    __slots__ = ("parts", "raw")

    def __init__(self, raw: Tensor, parts: list[Tensor]) -> None:
        self.raw = raw
        self.parts = parts

    @classmethod
    def over(cls, raw: Tensor, blueprint: Blueprint) -> Vector:
        """The vector that lies in these bytes."""
        return cls(raw, blueprint.parts(raw))

    def add_(self, other: Vector) -> Vector:
        # For booleans torch's addition is "or": a flag is set if any batch set it.
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.add_(theirs)
        return self

    @property
    def memory(self) -> memoryview:
        """Its bytes, to be sent; a copy if they are on another device."""
        return self.raw.cpu().numpy().data

    def is_same(self, other: Vector) -> bool:
        """Whether both hold the same bits; what lies between the parts does not count."""
        return all(map(same_bits, self.parts, other.parts))


class Row(Vector):
    """A vector that lies beside others in one block."""

    __slots__ = ("block", "number")

    def __init__(self, raw: Tensor, parts: list[Tensor], block: Block, number: int) -> None:
        super().__init__(raw, parts)
        self.block = block
        self.number = number


class Block:
    """Vectors in a row, in the CPU's memory, to be used again when all that were given out are back."""

    def __init__(self, blueprint: Blueprint, count: int) -> None:
        raw = torch.zeros(count, blueprint.moving_bytes, dtype=torch.uint8)
        # Of each part, those of all vectors.
        self.parts = blueprint.parts(raw)
        self.rows = [Row(raw[i], [part[i] for part in self.parts], self, i) for i in range(count)]
        self._memory = raw.view(-1).numpy().data
        self._row_bytes = blueprint.moving_bytes
        self._given = 0
        # Another thread may give back, so this only ever grows until we look.
        self._returned: list[int] = []

    def give(self, count: int) -> list[Row]:
        self._returned.clear()
        self._given = count
        return self.rows[:count]

    def take_back(self, row: Row) -> None:
        self._returned.append(row.number)

    @property
    def is_free(self) -> bool:
        return len(self._returned) == self._given

    def memory(self, start: int, stop: int) -> memoryview:
        return self._memory[start * self._row_bytes : stop * self._row_bytes]


def memory_of(vectors: Sequence[Vector]) -> list[memoryview]:
    """The bytes of all vectors, one after another; what lies together in one piece."""
    pieces: list[memoryview] = []
    at = 0
    while at < len(vectors):
        first, start = vectors[at], at
        at += 1
        if not isinstance(first, Row):
            pieces.append(first.memory)
            continue
        number = first.number + 1
        while at < len(vectors):
            row = vectors[at]
            if not isinstance(row, Row) or row.block is not first.block or row.number != number:
                break
            at, number = at + 1, number + 1
        pieces.append(first.block.memory(first.number, first.number + at - start))
    return pieces


def moving_buffers(module: torch.nn.Module, changed: set[str]) -> set[str]:
    """Buffers that travel with every update: those that changed in the trial, and small or related ones.

    A large buffer that never changes (a mask, a table of positions) should not cross the wire at each step;
    one that shares its module with a running statistic, or is small, may change later.
    """
    small_count = 4096
    owners = {name.rpartition(".")[0] for name in changed}
    persistent = set(module.state_dict(keep_vars=True))
    return {
        name
        for name, buffer in module.named_buffers()
        if name in persistent
        and (name in changed or name.rpartition(".")[0] in owners or buffer.numel() <= small_count)
        and has_differences(buffer)
    }


def has_differences(buffer: Tensor) -> bool:
    """Whether a change of this buffer can be told as a difference: torch can add it, and it is not NaN."""
    if buffer.dtype not in (torch.float32, torch.int64, torch.bool):
        try:
            torch.zeros(1, dtype=buffer.dtype).add_(torch.zeros(1, dtype=buffer.dtype))
        except NotImplementedError:
            return False  # uint16 or float8, for example: torch stores them but does not add them
    return not bool(buffer.isnan().any())


def describe(module: torch.nn.Module, moving: set[str]) -> Layout:
    """The layout of a module; refuses what could not be right as a flat vector."""
    entries = []
    for name, parameter in module.named_parameters():
        if isinstance(parameter, _LAZY):
            raise JobError(
                f"parameter {name} has no shape yet (a lazy module)",
                code="W5-221",
                fix="run one batch through the model inside model() before you return it",
            )
        role: Role = TRAINED if parameter.requires_grad else FROZEN
        entries.append(Entry(name, dtype_name(parameter.dtype), tuple(parameter.shape), role))
    persistent = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers():
        if name in persistent:
            if buffer.layout is not torch.strided:
                raise JobError(
                    f"buffer {name} is sparse",
                    code="W5-226",
                    fix="register its .to_dense(), or register it with persistent=False if it never changes",
                )
            role = MOVING if name in moving else STILL
            entries.append(Entry(name, dtype_name(buffer.dtype), tuple(buffer.shape), role))
    for entry in entries:
        if len(entry.name) > NAME_CHARACTERS_MAX:
            raise JobError(
                f"the name of {entry.name[:60]}… has {len(entry.name)} characters",
                code="W5-221",
                fix=f"nest modules less deeply or name them shorter (at most {NAME_CHARACTERS_MAX})",
            )
    if not any(entry.role == TRAINED for entry in entries):
        raise JobError(
            "the model has no parameter to train",
            code="W5-222",
            fix="return a module with parameters, at least one of them with requires_grad",
        )
    return Layout(entries)


class FlatModel:
    """A module bound to one flat buffer: writing the buffer changes the model, and the other way round."""

    def __init__(self, module: torch.nn.Module, layout: Layout, device: torch.device | str = "cpu") -> None:
        self.module = module.to(device)
        self.blueprint = Blueprint(layout)
        self.state = torch.zeros(self.blueprint.whole_bytes, dtype=torch.uint8, device=device)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        # Only what moves into the flat buffer could be torn apart; caches stay where they are.
        _refuse_overlaps({entry.name: tensors[entry.name] for entry in layout.entries})
        self.tensors: list[Tensor] = [tensors[entry.name] for entry in layout.entries]
        self._bind(fill=True)

    def _bind(self, *, fill: bool = False) -> None:
        """Let every parameter and buffer be its place in the state; `fill` it with what they hold."""
        self._places: list[tuple[Tensor, Tensor, int]] = []
        with torch.no_grad():
            for tensor, offset in zip(self.tensors, self.blueprint.offsets, strict=True):
                bytes_ = tensor.numel() * tensor.element_size()
                view = self.state[offset : offset + bytes_].view(tensor.dtype).view(tensor.shape)
                if fill:
                    view.copy_(tensor.detach())
                # .data keeps the tensor object, so that everybody who holds it sees the flat buffer.
                tensor.data = view
                self._places.append((tensor, view, view.data_ptr()))
        self.moving = Vector.over(self.state[: self.blueprint.moving_bytes], self.blueprint)

    def byte_count(self, *, whole: bool) -> int:
        return self.blueprint.whole_bytes if whole else self.blueprint.moving_bytes

    def memory(self, *, whole: bool) -> memoryview | None:
        """The state itself, to be read or written; None if it is on another device."""
        if self.state.device.type != "cpu":
            return None
        return self.state[: self.byte_count(whole=whole)].numpy().data

    def load(self, raw: bytearray | memoryview, *, whole: bool, in_place: bool = False) -> None:
        """Take over the parameters and buffers of a version; `in_place`: `raw` is our own memory."""
        count = self.byte_count(whole=whole)
        if len(raw) != count:
            raise ValueError(f"{len(raw)} bytes of parameters where {count} were expected")
        if count and not in_place:
            self.state[:count].copy_(torch.frombuffer(raw, dtype=torch.uint8))
        self.reclaim()

    def place(self, entry: int) -> Tensor:
        """Where an entry lies in the state; whoever writes there says `reclaim` afterwards."""
        return self._places[entry][1]

    def reclaim(self) -> None:
        """Let every parameter and buffer be its place in the state again."""
        for tensor, view, place in self._places:
            # Code that gives a parameter other memory (an LSTM's flatten_parameters on a GPU does) would
            # otherwise train on with old weights, and nobody would notice.
            if tensor.data_ptr() != place:
                tensor.data = view

    def gather(self) -> None:
        """Take over what somebody wrote into other memory and gave a parameter instead of ours.

        Optimizers written as `p.data = p.data - …` do; nodes would never see what they changed.
        """
        for tensor, view, place in self._places:
            if tensor.data_ptr() != place:
                view.copy_(tensor.detach())
                tensor.data = view

    def snapshot(self, *, whole: bool) -> memoryview:
        """A copy of the parameters and buffers that nobody will change."""
        return self.state[: self.byte_count(whole=whole)].to("cpu", copy=True).numpy().data

    def move(self) -> None:
        """Leave the state's memory to whoever still reads it, and go on with a copy."""
        self.state = self.state.clone()
        self._bind()


def _refuse_overlaps(tensors: dict[str, Tensor]) -> None:
    """Parameters that share memory without being one parameter would be torn apart by the flat buffer."""
    seen: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        if tensor.numel() and not isinstance(tensor, _LAZY):
            start = tensor.data_ptr()
            span = 1 + sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            seen.append((start, start + span * tensor.element_size(), name))
    seen.sort()
    for (_, end, first), (start, _, second) in pairwise(seen):
        if start < end:
            raise JobError(
                f"{first} and {second} share memory but are two tensors",
                code="W5-223",
                fix="tie weights by assigning the parameter itself:  decoder.weight = encoder.weight"
                " (for buffers, register a .clone())",
            )
