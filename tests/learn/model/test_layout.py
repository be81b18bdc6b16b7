"""The model is one flat vector: writing to either changes the other; unfit models are refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from w5xde.errors import JobError, JoinError
from w5xde.learn.job.job import Job
from w5xde.learn.job.node_setup import prepare_node
from w5xde.learn.model import layout as layouts
from w5xde.learn.model.layout import ALIGNMENT_BYTES, Blueprint, FlatModel, describe, moving_buffers
from w5xde.messages import FROZEN, MOVING, STILL, TRAINED, Entry, Layout, Rules, Welcome


class Everything(nn.Module):
    """Tied weights, a frozen layer, three dtypes, running statistics, a large table and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 5, bias=False)
        self.brief = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.decoder = nn.Linear(3, 5, bias=True)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("table", torch.randn(5000))
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 3))


def described(module: nn.Module, changed: set[str] = frozenset()) -> Layout:
    return describe(module, moving_buffers(module, set(changed)))


def flattened(module: nn.Module) -> FlatModel:
    return FlatModel(module, described(module))


def role_of(layout: Layout) -> dict[str, str]:
    return {entry.name: entry.role for entry in layout.entries}


# --- describing -----------------------------------------------------------------------------------


def test_a_layout_names_every_parameter_once_and_every_persistent_buffer():
    roles = role_of(described(Everything(), {"norm.running_mean"}))
    assert roles == {
        "brief": TRAINED,
        "scalar": TRAINED,
        "empty": TRAINED,
        "encoder.weight": TRAINED,
        "norm.weight": TRAINED,
        "norm.bias": TRAINED,
        "frozen.weight": FROZEN,
        "frozen.bias": FROZEN,
        "decoder.bias": TRAINED,
        "table": STILL,
        "norm.running_mean": MOVING,
        "norm.running_var": MOVING,
        "norm.num_batches_tracked": MOVING,
    }


def test_a_large_buffer_travels_only_if_it_or_its_neighbour_changed():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(5000))
    module.register_buffer("other", torch.zeros(5000))
    module.register_buffer("small", torch.zeros(4096))
    assert moving_buffers(module, set()) == {"small"}
    assert moving_buffers(module, {"table"}) == {"table", "other", "small"}


def test_layouts_have_one_digest_if_and_only_if_they_are_equal():
    assert described(nn.Linear(2, 3)).digest() == described(nn.Linear(2, 3)).digest()
    others = [
        nn.Linear(3, 2),
        nn.Linear(2, 3, bias=False),
        nn.Linear(2, 3).double(),
        nn.Sequential(nn.Linear(2, 3)),
    ]
    assert len({described(module).digest() for module in (nn.Linear(2, 3), *others)}) == 5
    partly = nn.Linear(2, 3)
    partly.bias.requires_grad_(False)
    assert described(partly).digest() != described(nn.Linear(2, 3)).digest()


def test_a_lazy_module_is_refused():
    with pytest.raises(JobError, match="parameter weight has no shape yet") as caught:
        described(nn.LazyLinear(3))
    assert "run one batch through the model inside model()" in caught.value.fix


@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "all frozen"]
)
def test_a_model_without_anything_to_train_is_refused(module):
    with pytest.raises(JobError, match="no parameter to train"):
        described(module)


# --- where everything lies ------------------------------------------------------------------------


def test_roles_follow_each_other_and_dtypes_lie_together():
    blueprint = Blueprint(described(Everything()))
    assert [(group.role, group.dtype) for group in blueprint.groups] == [
        (TRAINED, torch.bfloat16),
        (TRAINED, torch.float32),
        (MOVING, torch.float32),
        (MOVING, torch.int64),
        (FROZEN, torch.float32),
        (STILL, torch.float32),
    ]
    starts = [group.start for group in blueprint.groups]
    assert starts == sorted(starts)
    assert all(start % ALIGNMENT_BYTES == 0 for start in starts)
    assert blueprint.moving_bytes == blueprint.groups[4].start
    assert blueprint.whole_bytes >= starts[-1] + 5000 * 4


def test_the_documented_layout_is_the_one_in_force():
    text = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([\w.]+)` \| (\w+) \| ([\d, ]*) ?\| (\w+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE
    )
    assert len(rows) == 6
    layout = Layout(
        [
            Entry(name, dtype, tuple(int(n) for n in re.findall(r"\d+", shape)), role)
            for name, dtype, shape, role, _, _ in rows
        ]
    )
    blueprint = Blueprint(layout)
    assert blueprint.offsets == [int(offset) for *_, offset, _ in rows]
    assert f"has {blueprint.moving_bytes} bytes; the whole state has {blueprint.whole_bytes}." in text
    sizes = {"float32": 4, "bfloat16": 2, "int64": 8}
    for entry, row in zip(layout.entries, rows, strict=True):
        assert int(row[5]) == sizes[entry.dtype] * torch.Size(entry.shape).numel()


def test_padding_of_a_new_vector_is_no_old_memory_of_this_process(monkeypatch: pytest.MonkeyPatch):
    """A vector is sent with its padding."""
    blueprint = Blueprint(described(Everything(), {"norm.running_mean"}))
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda *size, **options: full(size, 77, **options))
    vector = blueprint.new_vector()
    for part in vector.parts:
        part.zero_()
    assert sum(part.nbytes for part in vector.parts) < vector.raw.nbytes
    assert not vector.raw.any()


# --- bound ----------------------------------------------------------------------------------------


def test_binding_changes_nothing_about_the_model():
    module = Everything()
    before = copy.deepcopy(module.state_dict())
    objects = {name: id(tensor) for name, tensor in module.named_parameters()}
    flattened(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert {name: id(tensor) for name, tensor in module.named_parameters()} == objects
    assert [p.requires_grad for p in module.parameters()] == [
        p.requires_grad for p in Everything().parameters()
    ]


def test_writing_the_state_changes_the_model():
    flat = flattened(Everything())
    flat.state.zero_()
    assert not any(tensor.any() for tensor in flat.module.state_dict().values())


def test_writing_the_model_changes_the_state():
    flat = flattened(Everything())
    for tensor, entry, offset in zip(
        flat.tensors, flat.blueprint.layout.entries, flat.blueprint.offsets, strict=True
    ):
        with torch.no_grad():
            tensor.fill_(1)
        size = tensor.numel() * tensor.element_size()
        mine = flat.state[offset : offset + size].view(tensor.dtype)
        assert torch.equal(mine, torch.ones_like(mine)), entry.name


def test_an_optimizer_step_is_seen_in_the_moving_part():
    flat = flattened(nn.Linear(2, 1, bias=False))
    flat.module(torch.ones(1, 2)).backward()
    torch.optim.SGD(flat.module.parameters(), lr=1.0).step()
    assert torch.equal(flat.moving.parts[0], flat.module.weight.detach().reshape(-1))


def test_tied_weights_stay_tied():
    flat = flattened(Everything())
    module = flat.module
    assert module.encoder.weight is module.decoder.weight
    with torch.no_grad():
        module.encoder.weight.fill_(3.0)
    assert bool((module.decoder.weight == 3).all())


def test_a_parameter_that_was_not_contiguous_keeps_its_values():
    module = nn.Linear(2, 3, bias=False)
    module.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    flat = flattened(module)
    assert torch.equal(flat.module.weight, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))
    assert flat.moving.parts[0][:6].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_a_running_statistic_is_kept_in_place_by_a_forward_pass():
    flat = flattened(nn.BatchNorm1d(2))
    flat.module(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    counts = next(
        part
        for part, group in zip(flat.moving.parts, flat.blueprint.moving_groups, strict=True)
        if group.dtype is torch.int64
    )
    assert counts.tolist() == [1]


# --- travelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_a_snapshot_loaded_elsewhere_makes_the_same_model(whole):
    torch.manual_seed(0)
    here = flattened(Everything())
    torch.manual_seed(0 if not whole else 1)
    there = flattened(Everything())
    with torch.no_grad():
        for parameter in here.module.parameters():
            if parameter.requires_grad:
                parameter.mul_(2)
        here.module.norm.running_mean.add_(1)
    there.load(bytearray(here.snapshot(whole=whole)), whole=whole)
    theirs = there.module.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in here.module.state_dict().items())


def test_a_snapshot_stays_as_it_is():
    flat = flattened(nn.Linear(2, 3))
    taken = flat.snapshot(whole=True)
    before = bytes(taken)
    flat.state.zero_()
    assert bytes(taken) == before


def test_parameters_of_another_size_are_not_loaded():
    flat = flattened(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="63 bytes of parameters where 64 were expected"):
        flat.load(bytearray(63), whole=False)


def test_vectors_are_added_part_by_part_and_truth_values_are_joined_by_or():
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("seen", torch.tensor([True, False, False]))
    blueprint = Blueprint(described(module))
    one, other = blueprint.new_vector(), blueprint.new_vector()
    for vector, number, flags in ((one, 1.5, [1, 0, 0]), (other, 2.0, [1, 1, 0])):
        vector.parts[0].fill_(number)
        vector.parts[1].copy_(torch.tensor(flags, dtype=torch.bool))
    one.add_(other)
    assert one.parts[0].tolist() == [3.5]
    assert one.parts[1].tolist() == [True, True, False]


# --- refused --------------------------------------------------------------------------------------


def test_parameters_that_share_memory_are_refused_by_name():
    module = nn.Module()
    base = torch.randn(4, 4)
    module.upper = nn.Parameter(base[:3])
    module.lower = nn.Parameter(base[2:])
    with pytest.raises(JobError, match="upper and lower share memory but are two tensors") as caught:
        flattened(module)
    assert "decoder.weight = encoder.weight" in caught.value.fix


def test_two_parameters_on_the_same_memory_are_refused():
    module = nn.Module()
    module.one = nn.Parameter(torch.randn(4))
    module.two = nn.Parameter(module.one.data)
    with pytest.raises(JobError, match="share memory"):
        flattened(module)


def test_neighbours_in_one_memory_are_fine():
    module = nn.Module()
    base = torch.arange(6.0)
    module.left = nn.Parameter(base[:3])
    module.right = nn.Parameter(base[3:])
    assert flattened(module).moving.parts[0].tolist() == base.tolist()


# --- differences ----------------------------------------------------------------------------------


def differences(ours: nn.Module, theirs: nn.Module) -> list[str]:
    return layouts.differences(described(ours), described(theirs))


def test_equal_layouts_do_not_differ():
    assert differences(Everything(), Everything()) == []


DIFFERENT: dict[str, tuple[nn.Module, list[str]]] = {
    "shape": (nn.Linear(4, 3), ["weight (3, 4) float32, expected (3, 2) float32"]),
    "dimensions": (nn.Bilinear(1, 2, 3), ["weight (3, 1, 2) float32, expected (3, 2) float32"]),
    "missing": (nn.Linear(2, 3, bias=False), ["missing bias (3,) float32"]),
    "dtype": (
        nn.Linear(2, 3).half(),
        ["weight (3, 2) float16, expected (3, 2) float32", "bias (3,) float16, expected (3,) float32"],
    ),
}


@pytest.mark.parametrize(("theirs", "sentences"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_difference_is_a_sentence_with_the_parameters_name(theirs, sentences):
    assert differences(nn.Linear(2, 3), theirs) == sentences


def test_what_is_too_much_is_told():
    assert differences(nn.Linear(2, 3, bias=False), nn.Linear(2, 3)) == ["extra bias (3,) float32"]


def test_a_frozen_parameter_and_a_buffer_are_called_so():
    frozen = nn.Linear(2, 3)
    frozen.bias.requires_grad_(False)
    assert differences(nn.Linear(2, 3), frozen) == ["bias (3,) float32 frozen, expected (3,) float32"]
    assert differences(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)) == [
        "missing running_mean (2,) float32 buffer",
        "missing running_var (2,) float32 buffer",
        "missing num_batches_tracked () int64 buffer",
    ]


def test_another_order_is_told():
    one, other = nn.Module(), nn.Module()
    one.a, one.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    other.b, other.a = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    assert differences(one, other) == ["the same parameters in another order"]


def test_a_dtype_that_this_torch_does_not_know_is_a_difference_too():
    job = Job(model=lambda: nn.Linear(2, 3, bias=False), data=list, loss=print, optimizer=print)
    rules = Rules(mode="sync", seed=0, precision="fp32", threads=1, data="stream")
    theirs = Layout([Entry("weight", "float13", (3, 2), TRAINED)])
    welcome = Welcome(run="orchard", incarnation=1, name="apple", layout=theirs, rules=rules)
    sentence = re.escape("weight (3, 2) float32, expected (3, 2) float13")
    with pytest.raises(JoinError, match=sentence):
        prepare_node(job, welcome, torch.device("cpu"))


def test_a_parameter_whose_name_is_too_long_to_travel_is_refused_at_start():
    module = nn.Module()
    module.add_module("x" * 195, nn.Linear(2, 3))
    with pytest.raises(JobError, match="name"):
        described(module)
