"""Named tuples, dataclasses and UserDicts arrive as they are; a name on the wire reaches no other type."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections import OrderedDict, UserDict, namedtuple
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import w5xde
from tests.learn.jobs import make, mlp
from w5xde.errors import JobError, RemoteProtocolError
from w5xde.learn.data.batch_types import NO_TYPES, BatchTypes
from w5xde.learn.data.payload import Packer, unpack
from w5xde.learn.data.samples import SampleFormat
from w5xde.learn.model.containers import make_record
from w5xde.learn.model.device import to_device
from w5xde.message_types import Item, MappingOf, RecordOf, TensorAt, Value

CPU = torch.device("cpu")


class Named(NamedTuple):
    images: Tensor
    labels: Tensor


Old = namedtuple("Old", "left right")


@dataclasses.dataclass
class Plain:
    text: Tensor
    mask: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Plain
    name: str


@dataclasses.dataclass
class Careful:
    """Notes that its constructor ran, and refuses an ordinary one."""

    text: Tensor
    built: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        raise RuntimeError("nothing that arrives may run this")


@dataclasses.dataclass
class Destructive:
    path: str

    def __del__(self) -> None:
        raise RuntimeError("nothing that arrives may run this")


@dataclasses.dataclass
class Singleton:
    number: int

    def __new__(cls, *arguments: Any) -> Singleton:
        return super().__new__(cls)


class Encoding(UserDict):
    """As transformers' BatchEncoding is made: keys are attributes too."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).mean()


JOB = make(mlp(), loss=own_loss)
TYPES = BatchTypes.of(JOB)


def packed(value: Any, types: BatchTypes = TYPES) -> tuple[Item, bytearray]:
    """A value on the wire."""
    packer = Packer(types)
    item = msgspec.msgpack.decode(msgspec.msgpack.encode(packer.pack(value)), type=Item)
    return item, bytearray(b"".join(packer.pieces))


def sent(value: Any, types: BatchTypes = TYPES, here: BatchTypes = TYPES) -> Any:
    """A value after its journey, as the loss gets it."""
    item, body = packed(value, types)
    return to_device(unpack(item, body, types=here), CPU)


ONE, TWO = torch.arange(3), torch.ones(2, 2)


def test_named_tuples_arrive_as_what_they_are():
    found = sent(Named(ONE, TWO))
    assert type(found) is Named
    assert torch.equal(found.images, ONE)
    assert torch.equal(found.labels, TWO)
    assert sent(Old(1, ("a", 2.5))) == Old(1, ("a", 2.5))
    assert type(sent([Old(1, 2)])[0]) is Old


def test_a_packed_sequence_arrives_although_its_constructor_is_not_run():
    given = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    found = sent(given)
    assert type(found) is PackedSequence
    assert torch.equal(found.data, given.data)
    assert torch.equal(found.batch_sizes, given.batch_sizes)


def test_dataclasses_arrive_without_their_constructor():
    found = sent({"batch": Frozen(Plain(ONE), "pear")})["batch"]
    assert type(found) is Frozen
    assert type(found.inner) is Plain
    assert torch.equal(found.inner.text, ONE)
    assert (found.inner.mask, found.name) == (None, "pear")
    careful = make_record(Careful, [ONE, 3])
    found = sent(careful)
    assert type(found) is Careful
    assert found.built == 3


def test_a_user_dict_arrives_with_its_methods():
    found = sent(Encoding({"input_ids": ONE, "n": 3}))
    assert type(found) is Encoding
    assert torch.equal(found.input_ids, ONE)
    assert found["n"] == 3
    assert dict(**found).keys() == {"input_ids", "n"}
    assert type(sent(UserDict(a=1))) is UserDict


def test_what_a_user_dict_holds_besides_stays_where_it_is_read():
    """With --data local nothing travels, and the loss gets the object itself with its tensors copied."""
    given = Encoding({"input_ids": ONE}, encodings="the tokenizer's own")
    found = to_device(given, CPU)
    assert type(found) is Encoding
    assert found.encodings == "the tokenizer's own"
    assert found["input_ids"].data_ptr() != ONE.data_ptr()


def test_a_user_dict_whose_type_is_not_known_arrives_as_a_dict():
    item, body = packed(Encoding({"input_ids": ONE}))
    assert isinstance(item, MappingOf)
    strange = MappingOf("nowhere:Encoding", item.keys, item.items)
    found = unpack(strange, body, types=TYPES)
    assert type(found) is dict
    assert torch.equal(found["input_ids"], ONE)


def test_other_dicts_arrive_as_dicts():
    assert type(sent(OrderedDict(b=1, a=2))) is dict
    assert sent(types.MappingProxyType({"a": 1})) == {"a": 1}


# --- which types are known --------------------------------------------------------------------------


def test_the_file_of_a_job_has_another_name_on_each_machine():
    """`__main__` where the user calls w5xde.train, `train` where a node joins with train.py."""
    other = types.ModuleType("train")
    source = (
        "from typing import NamedTuple\nfrom torch import Tensor\n"
        "class Named(NamedTuple):\n    images: Tensor\n    labels: Tensor\n"
        "def loss(model, batch): ..."
    )
    code = compile(source, "train.py", "exec")
    exec(code, vars(other))
    sys.modules["train"] = other
    try:
        there = BatchTypes.of(dataclasses.replace(JOB, loss=vars(other)["loss"]))
        found = sent(Named(ONE, TWO), here=there)
        assert type(found) is vars(other)["Named"]
        assert type(found) is not Named
    finally:
        del sys.modules["train"]


def test_types_of_modules_that_the_job_imports_are_known():
    assert TYPES.name_of(Named) == ":Named"
    assert TYPES.find("torch.nn.utils.rnn:PackedSequence") is PackedSequence


def test_functions_in_partials_and_methods_lead_to_their_module():
    job = dataclasses.replace(make(mlp()), loss=functools.partial(own_loss))
    assert BatchTypes.of(job).name_of(Named) is not None


@pytest.mark.parametrize("kind", [w5xde.Job, Destructive, Singleton, nn.Linear, dict, type, int])
def test_types_that_run_something_or_have_nothing_to_do_with_batches_are_never_known(kind):
    assert TYPES.name_of(kind) is None


def test_an_unknown_type_is_refused_before_it_is_sent():
    @dataclasses.dataclass
    class Local:
        text: Tensor

    with pytest.raises(JobError, match="is not known to the job") as caught:
        packed({"x": Local(ONE)})
    assert caught.value.code == "W5-258"
    assert "at the top level of the job file" in caught.value.fix


def test_attributes_that_are_no_fields_are_not_lost_silently():
    value = Plain(ONE)
    value.length = 3  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=r"attributes that are no fields \(length\), which cannot be sent"):
        packed(value)


# --- hostile descriptions ---------------------------------------------------------------------------

TENSOR = TensorAt("uint8", (1,), 0)
STRANGERS = [
    "subprocess:Popen",
    "builtins:dict",
    "builtins:object",
    "os:system",
    "w5xde.learn.job.job:Job",
    "w5xde.ticket:Ticket",
    ":Destructive",
    "tests.learn.data.test_batch_types:Destructive",
    ":Encoding.__init__",
    ":__class__",
    "",
    ":",
    "this:that",
]


@pytest.mark.parametrize("name", STRANGERS)
def test_a_name_from_the_wire_reaches_no_type_that_the_job_does_not_use(name):
    before = set(sys.modules)
    with pytest.raises(RemoteProtocolError) as caught:
        unpack(RecordOf(name, ["path"], [Value("/etc/passwd")]), bytearray(4), types=TYPES)
    assert caught.value.code == "W5-258"
    assert type(unpack(MappingOf(name, ["a"], [Value(1)]), bytearray(4), types=TYPES)) is dict
    assert set(sys.modules) == before


def test_a_module_that_is_named_is_never_imported():
    assert "this" not in sys.modules
    with pytest.raises(RemoteProtocolError):
        unpack(RecordOf("this:s", [], []), bytearray(), types=TYPES)
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "item",
    [
        RecordOf(":Named", ["images"], [TENSOR]),
        RecordOf(":Named", ["images", "labels"], [TENSOR]),
        RecordOf(":Named", ["labels", "images"], [TENSOR, TENSOR]),
        RecordOf(":Plain", ["text", "__class__"], [TENSOR, TENSOR]),
        RecordOf(":Plain", ["text", "mask", "more"], [TENSOR, Value(1), Value(1)]),
        RecordOf(":Encoding", ["data"], [Value(1)]),
        MappingOf(":Encoding", ["a", "b"], [Value(1)]),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_are_refused(item):
    with pytest.raises(RemoteProtocolError):
        unpack(item, bytearray(4), types=TYPES)


def test_a_record_cannot_be_made_as_a_mapping_nor_the_other_way_round():
    assert type(unpack(MappingOf(":Plain", ["text"], [Value(1)]), bytearray(), types=TYPES)) is dict
    with pytest.raises(RemoteProtocolError, match="other fields"):
        unpack(RecordOf(":Encoding", [], []), bytearray(), types=TYPES)


def test_without_a_job_no_type_is_known():
    item, body = packed(Named(ONE, TWO))
    with pytest.raises(RemoteProtocolError):
        unpack(item, body, types=NO_TYPES)


def test_samples_of_named_tuples_can_be_kept():
    count = 3
    item, _ = packed(Named(torch.zeros(count, 2), torch.zeros(count, dtype=torch.int64)))
    form = SampleFormat.of(item, count)
    assert form is not None
    larger = form.item(5)
    assert isinstance(larger, RecordOf)
    assert [each.shape for each in larger.items] == [(5, 2), (5,)]
