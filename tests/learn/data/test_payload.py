"""Batches arrive as they were sent, or are refused by name."""

from __future__ import annotations

import struct
import warnings
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from w5xde.errors import JobError, RemoteProtocolError
from w5xde.learn.data.payload import ALIGNMENT_BYTES, Packer, unpack
from w5xde.learn.model.device import to_device
from w5xde.learn.model.layout import DTYPES, dtype_name
from w5xde.message_types import Bytes, DictOf, Item, ListOf, TensorAt, TupleOf, Value

QUANTIZED = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}
PLAIN_DTYPES = sorted(set(DTYPES) - QUANTIZED)


@pytest.fixture(autouse=True)
def experimental_dtypes():
    """Torch warns of complex32 and of quantized dtypes, which are exactly what is tried here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support")
        warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
        yield


def sent(value: Any, before: int = 0) -> Any:
    """A value after its journey: described, encoded, decoded and built again, `before` bytes into a body."""
    packer = Packer()
    item = msgspec.msgpack.decode(msgspec.msgpack.encode(packer.pack(value)), type=Item)
    body = bytearray(before) + bytearray(b"".join(packer.pieces))
    assert len(body) == before + packer.body_bytes
    return unpack(item, body, before)


def raw(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit and type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        facts = [(t.dtype, t.shape, t.requires_grad, raw(t)) for t in (one, other)]
        return facts[0] == facts[1]
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    return bool(one == other)


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (), (0,), (2, 0, 3), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name", PLAIN_DTYPES)
def test_a_tensor_of_any_dtype_and_shape_keeps_every_bit(name, shape):
    dtype = DTYPES[name]
    count = int(np.prod(shape)) * dtype.itemsize
    values = torch.arange(7, 7 + count, dtype=torch.uint8)
    if dtype is torch.bool:
        values %= 2
    tensor = values.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(sent(tensor), tensor)


def test_no_dtype_of_torch_is_forgotten():
    common = {
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "complex64",
        "int64",
        "uint8",
        "bool",
        "float8_e5m2",
    }
    assert common <= set(PLAIN_DTYPES)
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())


VIEWS: dict[str, torch.Tensor] = {
    "odd numbers": torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-45]),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "every second": torch.arange(12).view(3, 4)[:, ::2],
    "expanded": torch.ones(3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "part of a conjugate": torch.randn(3, 4, dtype=torch.complex64).conj().t()[1:],
    "negative view": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "requires gradient": torch.ones(3, requires_grad=True),
    "complex requires gradient": torch.ones(2, dtype=torch.complex64, requires_grad=True),
    "computed": torch.ones(2, dtype=torch.bfloat16, requires_grad=True) * 2,
    "detached": torch.nn.Parameter(torch.ones(2)).detach(),
}


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())
def test_a_tensor_that_is_a_view_or_requires_a_gradient_arrives_as_plain_values(tensor):
    back = sent(tensor)
    assert same(back, tensor)
    assert back.is_contiguous()
    assert back.is_leaf


def test_numpy_arrays_and_numbers_arrive_as_tensors():
    assert same(
        sent(np.arange(6, dtype=np.int16).reshape(2, 3)), torch.arange(6, dtype=torch.int16).view(2, 3)
    )
    assert same(sent(np.float32(1.5)), torch.tensor(1.5))
    assert same(sent(np.bool_(True)), torch.tensor(True))


def test_each_tensor_has_memory_of_its_own_that_begins_where_torch_would_begin():
    packer = Packer()
    item = packer.pack([torch.zeros(1), torch.zeros(5), torch.zeros(3)])
    body = bytearray(16) + bytearray(b"".join(packer.pieces))
    one, two, three = to_device(unpack(item, body, 16), torch.device("cpu"))
    one += 1
    assert not any(body)
    assert not two.any()
    assert [t.data_ptr() % 64 for t in (one, two, three)] == [0, 0, 0]


def test_tensors_lie_at_multiples_of_sixteen_bytes():
    item = Packer().pack([torch.zeros(1, dtype=torch.int8), torch.zeros(2, dtype=torch.complex128)])
    assert ALIGNMENT_BYTES == 16
    assert [part.offset for part in item.items] == [0, 16]


def test_a_batch_is_read_from_where_it_begins_in_the_body():
    value = {"x": torch.arange(5), "y": (torch.ones(2, dtype=torch.complex128), 3)}
    assert same(sent(value, before=160), value)


# --- everything else ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**64 - 1,
        1.0,
        float("-inf"),
        float("nan"),
        -0.0,
        "",
        "pear · 梨 · 🍐",
        b"",
        b"\x00\xff",
        [],
        (),
        {},
        [[], ((),), {"a": []}],
        {"a": 1, 2: "b", None: True, 1.5: None, False: (1, 2)},
        ([1, 1.0, True, "1", b"1", None],),
    ],
    ids=repr,
)
def test_a_value_keeps_its_type(value):
    assert same(sent(value), value)


def test_a_dict_keeps_its_order_and_a_subclass_of_dict_arrives_as_one():
    assert list(sent({"b": 1, "a": 2})) == ["b", "a"]
    assert same(sent(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (np.str_("pear"), "pear"),
        (Name("pear"), "pear"),
        ({Name("pear"): 1}, {"pear": 1}),
        (np.bytes_(b"pear"), b"pear"),
    ],
    ids=["numpy's str", "a str of one's own", "a key", "numpy's bytes"],
)
def test_a_subclass_of_a_number_or_string_arrives_as_the_plain_one(value, arrives):
    assert same(sent(value), arrives)


def test_numpys_double_arrives_although_it_is_a_float_too():
    assert sent([np.float64(1.5)]) == [1.5]


# --- refused by name ------------------------------------------------------------------------------


class Image:
    """Stands for a picture of some library."""


UNSENDABLE: dict[str, tuple[Any, str]] = {
    "an object": (Image(), r"the batch holds a tests\.learn\.data\.test_payload\.Image"),
    "an object inside": (
        {"x": [1, Image()]},
        r"the batch\['x'\]\[1\] holds a tests\.learn\.data\.test_payload\.Image",
    ),
    "a set": ((torch.ones(2), {1, 2}), r"the batch\[1\] holds a set"),
    "a large integer": (2**64, "the batch holds an integer of more than 64 bits"),
    "a small integer": ([-(2**63) - 1], r"the batch\[0\] holds an integer of more than 64 bits"),
    "a sparse tensor": (torch.eye(3).to_sparse(), r"the batch holds a torch\.sparse_coo tensor"),
    "a tuple as key": ({(1, 2): 3}, "the batch holds a key of type tuple"),
    "bytes as key": ({b"k": 3}, "the batch holds a key of type bytes"),
    "a large integer as key": ({2**64: 3}, "the batch holds a key .*64 bits"),
    "an array of strings": (np.array(["a"]), r"the batch holds a numpy\.ndarray"),
    "an array of objects": (np.array([None]), r"the batch holds a numpy\.ndarray"),
    "a date": (np.datetime64("2024-01-01"), r"the batch holds a numpy\.datetime64"),
    "a complex number": (1j, "the batch holds a complex"),
    "a function": (len, "the batch holds a builtin_function_or_method"),
    "a bytearray": (bytearray(b"x"), "the batch holds a bytearray"),
    "text that is no Unicode": ({"file": "\udcff.png"}, r"the batch\['file'\] holds .*"),
}


@pytest.mark.parametrize(("value", "what"), UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_what_cannot_be_sent_is_refused_by_name(value, what):
    with pytest.raises(JobError, match=f"{what}.*cannot be sent") as caught:
        sent(value)
    assert caught.value.fix


def test_nesting_without_end_is_refused():
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(JobError, match="cannot be sent"):
        Packer().pack(endless)


# --- hostile descriptions -------------------------------------------------------------------------


def nested(depth: int) -> Item:
    item: Item = Value(1)
    for _ in range(depth):
        item = ListOf([item])
    return item


HOSTILE: dict[str, Item] = {
    "too long": TensorAt("float32", (17,), 0),
    "behind the end": TensorAt("float32", (1,), 64),
    "far behind the end": TensorAt("float32", (1,), 2**61),
    "across the end": TensorAt("float32", (16,), 4),
    "misaligned": TensorAt("float32", (1,), 2),
    "a number behind the end": TensorAt("float32", (), 64),
    "unknown dtype": TensorAt("float13", (1,), 0),
    "no dtype": TensorAt("", (1,), 0),
    "a module for a dtype": TensorAt("nn", (1,), 0),
    "too many bytes": TensorAt("int8", (2**61,), 0),
    "too many bytes to count": TensorAt("int8", (2**61, 2**61), 0),
    "as many bytes as none": TensorAt("int8", (2**32, 2**32), 0),
    "nothing of an impossible shape": TensorAt("float32", (0, 2**61, 2**61), 0),
    "an impossible shape of nothing": TensorAt("float32", (2**61, 2**61, 0), 0),
    "nothing behind the end": TensorAt("float32", (0,), 65),
    "integers with a gradient": TensorAt("int64", (1,), 0, requires_grad=True),
    "no truth values with a gradient": TensorAt("bool", (0,), 0, requires_grad=True),
    "a key without item": DictOf(["a"], []),
    "an item without key": DictOf([], [Value(1)]),
    "a key without item inside": ListOf([TupleOf([DictOf(["a", "b"], [Value(1)])])]),
    "nested without end": nested(20_000),
}


@pytest.mark.parametrize("item", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_description_is_the_peers_error(item):
    with pytest.raises(RemoteProtocolError):
        unpack(item, bytearray(64))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_any_dtype_a_peer_may_name_gives_a_tensor_or_the_peers_error(name):
    for shape in ((), (0,), (1,), (3,), (1,) * 64, (2, 0)):
        for requires_grad in (False, True):
            try:
                tensor = unpack(TensorAt(name, shape, 0, requires_grad), bytearray(64))
            except RemoteProtocolError:
                continue
            assert tensor.shape == shape


@given(
    dtype=st.sampled_from([*DTYPES, "float13"]),
    shape=st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**62 - 1]), max_size=5).map(tuple),
    offset=st.sampled_from([0, 1, 8, 16, 60, 64, 65, 2**62 - 1]),
    requires_grad=st.booleans(),
)
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_any_description_gives_a_tensor_or_the_peers_error(dtype, shape, offset, requires_grad):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tensor = unpack(TensorAt(dtype, shape, offset, requires_grad), bytearray(64))
        except RemoteProtocolError:
            return
    assert tensor.shape == shape


def test_bytes_and_values_are_taken_as_they_are():
    assert unpack(TupleOf([Bytes(b"x"), Value("y")]), bytearray()) == (b"x", "y")


# --- any nesting ----------------------------------------------------------------------------------


def _tensor(name: str, shape: tuple[int, ...], salt: int) -> torch.Tensor:
    dtype = DTYPES[name]
    count = int(np.prod(shape)) * dtype.itemsize
    values = (torch.arange(count) * 37 + salt).to(torch.uint8)
    if dtype is torch.bool:
        values %= 2
    return values.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


_TENSORS = st.builds(
    _tensor,
    st.sampled_from([name for name in PLAIN_DTYPES if name != "complex32"]),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.integers(0, 255),
)
_KEYS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(
    _KEYS | st.floats() | st.binary() | _TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=4)
    ),
    max_leaves=15,
)


@given(value=_VALUES, before=st.sampled_from([0, 16, 4096]))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_any_nesting_arrives_as_it_was_sent(value, before):
    assert same(sent(value, before), value)
