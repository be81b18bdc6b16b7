"""The data of a Lightning job: the loaders of a data module, of a module, or loaders as they are.

Opened at most once in each process, and only where data is read. Knows nothing of how batches are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from w5xde.errors import JobError

_KINDS = "a LightningDataModule, a DataLoader, or a pair of DataLoaders for training and validation"


class LightningData:
    """What the user's function returns, and the loaders that are in it."""

    def __init__(self, build: Callable[[], Any] | None, kind: Any, trainer: Callable[[], Any]) -> None:
        """`kind` is the class of data modules; `trainer` gives what a data module sees as its trainer."""
        self._build = build
        self._kind = kind
        self._trainer = trainer
        self._found: Any = None
        self._is_set_up = False

    @property
    def module(self) -> Any:
        """The data module, not set up if no data was read yet; None if the data is something else."""
        if self._build is None:
            return None
        if self._found is None:
            self._found = self._build()
            if isinstance(self._found, self._kind):
                self._found.trainer = self._trainer()
        return self._found if isinstance(self._found, self._kind) else None

    def train_loader(self, owner: Any) -> DataLoader[Any]:
        """The loader of training batches; `owner` is the LightningModule."""
        source = self._source(owner)
        if source is not None:
            return _one(source.train_dataloader())
        return _one(self._found[0] if self._is_pair else self._found)

    def validation_loaders(self, owner: Any) -> Any:
        """One loader, or several, of validation batches."""
        source = self._source(owner)
        return source.val_dataloader() if source is not None else self._found[1]

    def _source(self, owner: Any) -> Any:
        """The module that makes loaders, ready to do so; None if the user gave loaders themselves."""
        if self._build is not None and self.module is None:
            return None
        source = self.module or owner
        if not self._is_set_up:
            self._is_set_up = True
            source.prepare_data()
            if source is not owner:
                source.setup("fit")
        return source

    @property
    def _is_pair(self) -> bool:
        return isinstance(self._found, tuple | list) and len(self._found) == 2

    @property
    def has_validation(self) -> bool:
        """Whether there is a loader for validation, as far as that is known before data is read."""
        if self.module is not None:
            return type(self.module).val_dataloader is not self._kind.val_dataloader
        return self._is_pair


def _one(loader: Any) -> DataLoader[Any]:
    if isinstance(loader, DataLoader):
        return loader
    several = isinstance(loader, list | tuple | dict)
    raise JobError(
        f"the loader of training batches is a {type(loader).__name__}",
        code="W5-295",
        why="batches of several loaders are not of one data set, in which every sample counts once"
        if several
        else "",
        fix="combine the data sets: torch.utils.data.ConcatDataset, or one whose samples are pairs"
        if several
        else f"return {_KINDS}",
    )
