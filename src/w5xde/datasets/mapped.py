"""Data sets in files that are mapped into memory: only the samples that are read are loaded.

A *column* is one tensor with a row for each sample, in one file or in several that follow each other
(shards): `.npy` files, or tensors in `.safetensors` files. Nothing that can execute code is read. torch and
numpy are imported inside functions, so that importing w5xde stays light.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from w5xde.errors import JobError

if TYPE_CHECKING:
    from torch import Tensor

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
# One row of a file, as a tensor of its own.
Row: TypeAlias = "Callable[[int], Tensor]"


class MappedDataset:
    """A map-style data set of columns. A sample is a tuple or a dict with a row of each."""

    def __init__(self, columns: Mapping[str, _Column], *, as_dict: bool) -> None:
        self._columns = dict(columns)
        self._as_dict = as_dict
        self._rows = next(iter(self._columns.values())).rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, number: int) -> tuple[Tensor, ...] | dict[str, Tensor]:
        place = number + self._rows if number < 0 else number
        if not 0 <= place < self._rows:
            raise IndexError(f"sample {number} of {self._rows}")
        if self._as_dict:
            return {name: column.row(place) for name, column in self._columns.items()}
        return tuple(column.row(place) for column in self._columns.values())


class _Column:
    """The rows of one tensor, in all its shards."""

    def __init__(self, shards: list[tuple[int, Row]]) -> None:
        self._shards = [row for _, row in shards]
        self._ends = list(accumulate(count for count, _ in shards))
        self.rows = self._ends[-1]

    def row(self, place: int) -> Tensor:
        shard = bisect.bisect_right(self._ends, place)
        return self._shards[shard](place - (self._ends[shard - 1] if shard else 0))


def mapped(*columns: Paths, **named: Paths) -> MappedDataset:
    """A data set of files that are mapped into memory, and not loaded.

        mapped("images.npy", "labels.npy")                        samples are tuples (image, label)
        mapped(image=["a.npy", "b.npy"], label="labels.npy")      samples are dicts; images in two shards
        mapped(["train-0.safetensors", "train-1.safetensors"])    samples are dicts of the tensors there

    Every tensor has a row for each sample, and all have the same number of rows.
    """
    given = {**{str(place): paths for place, paths in enumerate(columns)}, **named}
    if not given or (columns and named):
        raise JobError(
            "mapped() takes columns, or named columns, and not both",
            code="W5-203",
            fix='mapped("images.npy", "labels.npy") or mapped(image="images.npy", label="labels.npy")',
        )
    files = {name: _files(paths) for name, paths in given.items()}
    has_names = any(paths[0].suffix == ".safetensors" for paths in files.values())
    if has_names:
        if len(files) > 1 or named:
            raise JobError(
                "mapped() takes one list of safetensors files and nothing else: their tensors have names",
                code="W5-203",
                fix='mapped(["train-0.safetensors", "train-1.safetensors"])',
            )
        found = _open_safetensors(files["0"])
    else:
        found = {name: _open_npy(paths) for name, paths in files.items()}
    counts = {name: column.rows for name, column in found.items()}
    if len(set(counts.values())) != 1:
        said = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise JobError(
            f"the columns have different numbers of rows ({said})",
            code="W5-204",
            fix="every column has a row for each sample",
        )
    return MappedDataset(found, as_dict=has_names or bool(named))


def _files(paths: Paths) -> list[Path]:
    found = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(path) for path in paths]
    if not found:
        raise JobError("mapped() got a column without files", code="W5-203", fix="name its .npy files")
    for path in found:
        if path.suffix not in (".npy", ".safetensors") or path.suffix != found[0].suffix:
            raise JobError(
                f"{path} is not a file that can be mapped with the others",
                code="W5-203",
                fix="a column is .npy files (numpy.save), or all of it is .safetensors files",
            )
    return found


def _unreadable(path: Path, why: object) -> JobError:
    return JobError(
        f"{path} cannot be mapped: {why}",
        code="W5-203",
        fix="save it again, with numpy.save(…, allow_pickle=False) or safetensors",
    )


def _open_npy(paths: list[Path]) -> _Column:
    import numpy as np
    import torch

    shards: list[tuple[int, Row]] = []
    kinds = set()
    for path in paths:
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if not array.ndim:
            raise _unreadable(path, "it holds one number, and not a row for each sample")
        try:
            # Torch has no big-endian numbers, and not all dtypes of numpy.
            torch.from_numpy(np.zeros(0, array.dtype))
        except (TypeError, ValueError) as error:
            raise _unreadable(path, error) from error
        kinds.add((array.dtype, array.shape[1:]))
        shards.append((len(array), partial(_npy_row, array)))
    _require_alike(paths, kinds)
    return _Column(shards)


def _npy_row(array: Any, place: int) -> Tensor:
    import numpy as np
    import torch

    # A copy: a tensor that shares the memory of the file could not be written to.
    return torch.from_numpy(np.array(array[place]))


def _tensor_row(tensor: Tensor, place: int) -> Tensor:
    return tensor[place].clone()


def _open_safetensors(paths: list[Path]) -> dict[str, _Column]:
    from safetensors import SafetensorError, safe_open

    columns: dict[str, list[tuple[int, Row]]] = {}
    kinds: dict[str, set[Any]] = {}
    for path in paths:
        try:
            # The library maps the file, and gives tensors that are views of the map.
            with safe_open(path, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise _unreadable(path, error) from error
        if not tensors or (columns and tensors.keys() != columns.keys()):
            raise _unreadable(path, f"its tensors are {sorted(tensors)}, not {sorted(columns)}")
        for name, tensor in tensors.items():
            if not tensor.ndim:
                raise _unreadable(path, f"{name} is one number, and has no row for each sample")
            kinds.setdefault(name, set()).add((tensor.dtype, tensor.shape[1:]))
            columns.setdefault(name, []).append((len(tensor), partial(_tensor_row, tensor)))
    for each in kinds.values():
        _require_alike(paths, each)
    return {name: _Column(shards) for name, shards in columns.items()}


def _require_alike(paths: list[Path], kinds: set[Any]) -> None:
    if len(kinds) > 1:
        said = " and ".join(f"{dtype} {tuple(shape)}" for dtype, shape in sorted(kinds, key=str))
        raise JobError(
            f"the rows of {paths[0]} and its other shards differ: {said}",
            code="W5-204",
            fix="save all shards with one dtype, and rows of one shape",
        )
