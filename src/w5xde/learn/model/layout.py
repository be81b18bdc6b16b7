"""The model as one flat vector: every parameter and buffer is a view of one buffer of bytes.

    | trained parameters | moving buffers | carried statistics | frozen parameters | still buffers |
    |<-------------------- the moving part ----------------->|

Within each role entries of one dtype lie together, so that arithmetic on a whole role is one operation per
dtype. Every version sends the moving part; an update has the same layout, with gradients in place of
parameters and differences in place of buffers. Only updates in rounds mode carry statistics. Knows nothing of
training, codecs or sockets.
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
from w5xde.learn.model.parallel import add_to
from w5xde.learn.model.route import VectorRoute
from w5xde.learn.model.state_memory import StatePlace, StateView
from w5xde.message_types import NAME_CHARACTERS_MAX
from w5xde.messages import AVERAGED, CARRIED, FROZEN, MOVING, STILL, TRAINED, Entry, Layout, Role

# A cache line: no two groups share one.
ALIGNMENT_BYTES = 64
# A buffer of at most this many values costs little to send with every update, even if it never changes.
SMALL_BUFFER_COUNT = 4096
_LAZY = (UninitializedParameter, UninitializedBuffer)
_ROLES = (TRAINED, MOVING, CARRIED, AVERAGED, FROZEN, STILL)
_MOVING_ROLES = (TRAINED, MOVING, CARRIED, AVERAGED)

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class DtypeGroup:
    """All entries of one role and dtype: `count` values from byte `start` on."""

    role: str
    dtype: torch.dtype
    start: int
    count: int
    entries: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.count * self.dtype.itemsize

    def bytes_in(self, raw: Tensor) -> Tensor:
        """Its bytes in the bytes of a vector, or of many vectors that are rows."""
        return raw[..., self.start : self.end]

    def values_in(self, raw: Tensor) -> Tensor:
        """Its values in the bytes of a vector, or of many vectors that are rows."""
        return self.bytes_in(raw).view(self.dtype)


def aligned(count: int) -> int:
    """The first multiple of the alignment that is not below `count`."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Blueprint:
    """The offset of every entry and group of a layout. It follows from the layout, so all machines agree."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.offsets = [0] * len(layout.entries)
        self.groups: list[DtypeGroup] = []
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
            if role == AVERAGED:
                self.moving_bytes = at
        self.whole_bytes = at
        self.moving_groups = [group for group in self.groups if group.role in _MOVING_ROLES]
        self.trained = [i for i, entry in enumerate(layout.entries) if entry.role == TRAINED]

    def _place(self, role: str, dtype: torch.dtype, chosen: tuple[int, ...], at: int) -> int:
        start, count = at, 0
        for i in chosen:
            self.offsets[i] = start + count * dtype.itemsize
            count += math.prod(self.layout.entries[i].shape)
        self.groups.append(DtypeGroup(role, dtype, start, count, chosen))
        return aligned(self.groups[-1].end)

    def parts(self, raw: Tensor) -> list[Tensor]:
        """Typed views of the groups of the moving part; of one vector, or of many that are rows."""
        return [group.values_in(raw) for group in self.moving_groups]

    def entries_in(self, raw: Tensor, entries: Sequence[int]) -> list[Tensor]:
        """Views of these entries in the bytes of a vector or of a state, each with its dtype and shape."""
        views = []
        for i in entries:
            entry, offset = self.layout.entries[i], self.offsets[i]
            dtype = DTYPES[entry.dtype]
            count = math.prod(entry.shape) * dtype.itemsize
            views.append(raw[offset : offset + count].view(dtype).view(entry.shape))
        return views

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
        """A vector with any values; its padding is zero."""
        raw = torch.empty(self.moving_bytes, dtype=torch.uint8, device=device)
        for group in self.moving_groups:
            # Never send what was in this memory before.
            raw[group.end : aligned(group.end)] = 0
        return Vector.over(raw, self)


def differences(ours: Layout, theirs: Layout) -> list[str]:
    """How another layout differs from ours: one phrase for each difference."""
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
    kind = {TRAINED: "", FROZEN: " frozen", CARRIED: " statistic", AVERAGED: " statistic"}.get(
        entry.role, " buffer"
    )
    return f"{tuple(entry.shape)} {entry.dtype}{kind}"


class Vector:
    """One update: raw bytes and, for arithmetic, one typed view for each group of the moving part."""

    __slots__ = ("parts", "raw")

    def __init__(self, raw: Tensor, parts: list[Tensor]) -> None:
        self.raw = raw
        self.parts = parts

    @classmethod
    def over(cls, raw: Tensor, blueprint: Blueprint) -> Vector:
        """The vector in these bytes."""
        return cls(raw, blueprint.parts(raw))

    def add_(self, other: Vector) -> Vector:
        # torch adds booleans by "or": a flag is set if any batch set it.
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            add_to(mine, theirs)
        return self

    @property
    def memory(self) -> memoryview:
        """Its bytes; a copy if they are on another device."""
        return self.raw.cpu().numpy().data

    def is_same(self, other: Vector) -> bool:
        """Whether both hold the same bits; padding between the parts does not count."""
        return all(map(same_bits, self.parts, other.parts))


def moving_buffers(module: torch.nn.Module, changed: set[str]) -> set[str]:
    """The buffers that every update carries: those that the first batch changed, and small or related ones.

    A large buffer that never changes (a mask, a table of positions) should not be sent at each step; one that
    shares its module with a running statistic, or is small, may change later.
    """
    owners = {name.rpartition(".")[0] for name in changed}
    persistent = set(module.state_dict(keep_vars=True))
    return {
        name
        for name, buffer in module.named_buffers()
        if name in persistent
        and (name in changed or name.rpartition(".")[0] in owners or buffer.numel() <= SMALL_BUFFER_COUNT)
        and has_differences(buffer)
    }


def has_differences(buffer: Tensor) -> bool:
    """Whether a change of this buffer can be sent as a difference: torch adds its dtype, it has no NaN."""
    if buffer.dtype not in (torch.float32, torch.int64, torch.bool):
        try:
            torch.zeros(1, dtype=buffer.dtype).add_(torch.zeros(1, dtype=buffer.dtype))
        except NotImplementedError:
            return False  # for example uint16 or float8, which torch stores but does not add
    return not bool(buffer.isnan().any())


def describe(module: torch.nn.Module, moving: set[str]) -> Layout:
    """The layout of a module; refuses modules that a flat vector cannot represent."""
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
    """A module bound to one flat buffer: writing to either changes the other."""

    def __init__(
        self,
        module: torch.nn.Module,
        layout: Layout,
        device: torch.device | str = "cpu",
        *,
        place: StatePlace = lambda vector_bytes, whole_bytes: None,
        view: StateView | None = None,
    ) -> None:
        """The state lies in memory that `place` gives; or it is a `view`, which has its own values."""
        self.module = module.to(device)
        self.blueprint = Blueprint(layout)
        count = self.blueprint.whole_bytes
        is_here = torch.device(device).type == "cpu"
        is_fit = view is not None and is_here and len(view.memory) >= count
        self._view = view if is_fit and VectorRoute(self.blueprint.moving_bytes).is_viewed else None
        memory = self._view.memory if self._view is not None else place(self.blueprint.moving_bytes, count)
        self.state = (
            torch.frombuffer(memory, dtype=torch.uint8, count=count)
            if memory is not None
            else torch.zeros(count, dtype=torch.uint8, device=device)
        )
        # The memory in which the state should lie, because others look there.
        self._home = self.state if memory is not None else None
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        # Only tensors that move into the flat buffer; caches keep their memory.
        _refuse_overlaps({entry.name: tensors[entry.name] for entry in layout.entries})
        self.tensors: list[Tensor] = [tensors[entry.name] for entry in layout.entries]
        self._bind(fill=self._view is None)

    def _bind(self, *, fill: bool = False) -> None:
        """Make every parameter and buffer a view of the state; `fill` copies their values there first."""
        self._places: list[tuple[Tensor, Tensor, int]] = []
        with torch.no_grad():
            for tensor, offset in zip(self.tensors, self.blueprint.offsets, strict=True):
                view = self.state[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                if fill:
                    view.copy_(tensor.detach())
                # .data keeps the tensor object, so that every holder of it sees the flat buffer.
                tensor.data = view
                self._places.append((tensor, view, view.data_ptr()))
        self.moving = Vector.over(self.state[: self.blueprint.moving_bytes], self.blueprint)

    def byte_count(self, *, whole: bool) -> int:
        return self.blueprint.whole_bytes if whole else self.blueprint.moving_bytes

    def memory(self, *, whole: bool) -> memoryview | None:
        """The memory of the state, for reading and writing; None if it is on another device."""
        if self.state.device.type != "cpu":
            return None
        return self.state[: self.byte_count(whole=whole)].numpy().data

    def load(self, raw: bytearray | memoryview, *, whole: bool, in_place: bool = False) -> None:
        """Set the parameters and buffers of a version; `in_place`: `raw` is the memory of the state."""
        count = self.byte_count(whole=whole)
        if len(raw) != count:
            raise ValueError(f"{len(raw)} bytes of parameters where {count} were expected")
        if count and not in_place:
            given = torch.frombuffer(raw, dtype=torch.uint8)
            if self._view is not None and given.data_ptr() == self.state.data_ptr():
                self._view.follow()
            else:
                self.state[:count].copy_(given)
        self.reclaim()

    def place(self, entry: int) -> Tensor:
        """The view of an entry in the state; call `reclaim` after writing to it."""
        return self._places[entry][1]

    def reclaim(self) -> None:
        """Make every parameter and buffer a view of the state again.

        Code that gives a parameter other memory (flatten_parameters of an LSTM on a GPU does) would otherwise
        train on with old weights, unnoticed.
        """
        for tensor, view in self._strayed():
            tensor.data = view

    def gather(self) -> None:
        """Copy into the state what other code left in other memory, then `reclaim`.

        Optimizers written as `p.data = p.data - …` do that; nodes would never see their changes.
        """
        for tensor, view in self._strayed():
            view.copy_(tensor.detach())
            tensor.data = view

    def _strayed(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and buffers that are no longer in the state, and their views of it."""
        return [(tensor, view) for tensor, view, place in self._places if tensor.data_ptr() != place]

    def snapshot(self, *, whole: bool) -> memoryview:
        """A copy of the parameters and buffers."""
        return self.state[: self.byte_count(whole=whole)].to("cpu", copy=True).numpy().data

    @property
    def is_view(self) -> bool:
        """Whether the state is that of another process, which may change it at any time."""
        return self._view is not None

    @property
    def is_away(self) -> bool:
        """Whether the state had to leave the memory in which others look for it."""
        return self._home is not None and self.state is not self._home

    def move(self) -> None:
        """Continue with a copy of the state, and leave the old memory to its readers."""
        self.state = self.state.clone()
        self._bind()

    def return_home(self) -> None:
        """Continue in the memory in which others look for the state."""
        if self._home is not None:
            self.state = self._home.copy_(self.state)
            self._bind()


def _refuse_overlaps(tensors: dict[str, Tensor]) -> None:
    """Refuse distinct tensors that share memory: the flat buffer would separate them."""
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
