"""Mapped data sets: rows of files, read one by one, and never executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

import w5xde
from tests.system import jobs
from w5xde.datasets import mapped
from w5xde.errors import JobError

IMAGES = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
LABELS = np.arange(10)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    np.save(tmp_path / "images.npy", IMAGES)
    np.save(tmp_path / "labels.npy", LABELS)
    for shard, rows in enumerate((slice(0, 1), slice(1, 1), slice(1, 7), slice(7, 10))):
        np.save(tmp_path / f"part-{shard}.npy", IMAGES[rows])
        tensors = {"x": torch.from_numpy(IMAGES[rows].copy()), "y": torch.from_numpy(LABELS[rows].copy())}
        tensors["half"] = tensors["x"].bfloat16()
        save_file(tensors, tmp_path / f"part-{shard}.safetensors")
    return tmp_path


def refused(*columns: Any, **named: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        mapped(*columns, **named)
    assert caught.value.code in ("W5-203", "W5-204")
    return caught.value


def test_columns_make_tuples_and_named_columns_dicts(files: Path) -> None:
    pairs = mapped(files / "images.npy", str(files / "labels.npy"))
    assert len(pairs) == 10
    for number, (image, label) in enumerate(pairs[i] for i in range(10)):
        assert image.numpy().tolist() == IMAGES[number].tolist()
        assert (image.dtype, label.dtype, label.item()) == (torch.float32, torch.int64, number)
    named = mapped(image=files / "images.npy", label=files / "labels.npy")
    assert list(named[3]) == ["image", "label"]
    assert torch.equal(named[-1]["image"], torch.from_numpy(IMAGES[9]))
    for beyond in (10, -11):
        with pytest.raises(IndexError):
            pairs[beyond]


def test_shards_follow_each_other(files: Path) -> None:
    shards = [files / f"part-{shard}.npy" for shard in range(4)]
    [rows] = zip(*(mapped(shards)[i] for i in range(10)), strict=True)
    assert torch.equal(torch.stack(rows), torch.from_numpy(IMAGES))


def test_safetensors_have_their_names(files: Path) -> None:
    data = mapped([files / f"part-{shard}.safetensors" for shard in range(4)])
    assert len(data) == 10
    for number in range(10):
        sample = data[number]
        assert sample.keys() == {"x", "y", "half"}
        assert torch.equal(sample["x"], torch.from_numpy(IMAGES[number]))
        assert (sample["y"].item(), sample["half"].dtype) == (number, torch.bfloat16)


def test_a_sample_is_a_copy(files: Path) -> None:
    for data in (mapped(files / "images.npy"), mapped(files / "part-3.safetensors")):
        for value in data[0] if isinstance(data[0], tuple) else data[0].values():
            before = value.clone()
            value.zero_()
            assert before.any() or not before.numel()
        again = data[0] if isinstance(data[0], tuple) else tuple(data[0].values())
        assert any(value.any() for value in again)


@pytest.mark.parametrize("suffix", ["npy", "safetensors"])
def test_a_large_file_is_not_loaded(suffix: str, tmp_path: Path) -> None:
    rows, count = 4096, 16384
    path = tmp_path / f"large.{suffix}"
    if suffix == "npy":
        np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, count)).flush()
    else:
        save_file({"x": torch.zeros(rows, count)}, path)
    before = psutil.Process().memory_full_info().uss
    data = mapped(path)
    assert len(data) == rows
    for number in (0, rows // 2, rows - 1):
        assert data[number] is not None
    assert psutil.Process().memory_full_info().uss - before < rows * count * 4 / 8


def test_what_cannot_be_mapped_is_refused_by_name(files: Path) -> None:
    np.save(files / "objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save(files / "words.npy", np.array(["a", "b"]))
    np.save(files / "big.npy", LABELS.astype(">i8"))
    np.save(files / "number.npy", np.float32(1))
    np.save(files / "double.npy", IMAGES.astype(np.float64))
    np.save(files / "few.npy", LABELS[:9])
    (files / "torn.npy").write_bytes((files / "images.npy").read_bytes()[:150])
    (files / "torn.safetensors").write_bytes(b"\xff" * 100)
    for name in ("objects", "words", "big", "number", "torn", "none"):
        assert f"{name}.npy" in refused(files / f"{name}.npy").what
    assert "torn.safetensors" in refused(files / "torn.safetensors").what
    assert "differ" in refused([files / "images.npy", files / "double.npy"]).what
    assert "different numbers of rows (0: 10, 1: 9)" in refused(files / "images.npy", files / "few.npy").what
    for columns in ([], [[]], [files / "data.pt"], [[files / "images.npy", files / "part-0.safetensors"]]):
        refused(*columns)
    refused(files / "images.npy", label=files / "labels.npy")
    refused(files / "part-0.safetensors", files / "part-1.safetensors")
    save_file({"z": torch.zeros(2)}, files / "other.safetensors")
    assert (
        "its tensors are ['z']" in refused([files / "part-0.safetensors", files / "other.safetensors"]).what
    )


def test_training_on_mapped_files_gives_the_same_bits(tmp_path: Path) -> None:
    inputs, labels = jobs.data().tensors
    np.save(tmp_path / "x.npy", inputs.numpy())
    np.save(tmp_path / "y.npy", labels.numpy())

    def data() -> Any:
        return mapped(tmp_path / "x.npy", tmp_path / "y.npy")

    job = w5xde.Job(model=jobs.model, data=data, loss=jobs.loss, optimizer=jobs.optimizer)
    weights = [
        w5xde.train(each, nodes=2, epochs=2, runs=str(tmp_path), **more).summary["weights_sha256"]
        for each, more in ((jobs.job, {}), (job, {}), (job, {"data": "cached"}))
    ]
    assert len(set(weights)) == 1
