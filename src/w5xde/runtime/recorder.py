"""The run folder: what is kept of a run, readable by anybody without w5xde.

runs/NAME/manifest.json       what was run: settings, versions, model, result
runs/NAME/metrics.jsonl       one object every moment: step, loss, rates, nodes
runs/NAME/events.jsonl        one object per event: who joined, left, failed, and when
runs/NAME/model.safetensors   the trained weights
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from safetensors import SafetensorError

import w5xde
from w5xde.config import Settings
from w5xde.errors import StorageError


def to_json(value: Any) -> str:
    """JSON that every reader takes: what is not a number becomes null."""
    return msgspec.json.encode(value).decode()


class Recorder:
    """Writes one run's folder."""

    def __init__(self, settings: Settings, job_name: str) -> None:
        self.name = settings.name or _free_name(Path(settings.runs), job_name)
        self.folder = Path(settings.runs) / self.name
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir()
        except FileExistsError:
            raise StorageError(
                f"there is a run named {self.name} already",
                code="W5-403",
                fix="choose another --name, or leave it out for a new one",
            ) from None
        except OSError as error:
            raise StorageError(
                f"the run folder {self.folder} cannot be made: {error.strerror}",
                code="W5-404",
                fix="choose another folder with --runs",
            ) from error
        self._facts: dict[str, Any] = {
            "run": self.name,
            "w5xde": w5xde.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "settings": msgspec.to_builtins(settings),
        }
        self._tell: Callable[[str], None] = lambda text: None
        self._is_told = False
        self._metrics = self._open("metrics.jsonl")
        self._events = self._open("events.jsonl")

    @property
    def model_path(self) -> Path:
        return self.folder / "model.safetensors"

    def _open(self, name: str) -> IO[str]:
        # One line at a time reaches the file, so that a killed coordinator leaves whole lines.
        return (self.folder / name).open("a", encoding="utf-8", buffering=1)

    def manifest(self, facts: dict[str, Any]) -> None:
        """Add to the manifest; the file is written whole or not at all."""
        self._facts |= facts
        path = self.folder / "manifest.json"
        aside = path.with_suffix(".tmp")
        try:
            aside.write_text(to_json(self._facts) + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError as error:
            self._trouble(path.name, error)

    def watch(self, trouble: Callable[[str], None]) -> None:
        """Training goes on when the folder cannot be written; `trouble` tells once."""
        self._tell = trouble

    def metrics(self, row: dict[str, Any]) -> None:
        self._write(self._metrics, row)

    def _write(self, file: IO[str], row: dict[str, Any]) -> None:
        try:
            file.write(to_json(row) + "\n")
        except OSError as error:
            self._trouble(file.name, error)

    def _trouble(self, name: str, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            self._tell(f"{name} cannot be written: {error.strerror}; training goes on")

    def save(self, write: Callable[[Path], None]) -> None:
        """Write the model; a folder that cannot be written is told with its fix."""
        try:
            write(self.model_path)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"the model cannot be saved in {self.folder}: {error}",
                code="W5-402",
                fix="make room there, or choose another folder with --runs",
            ) from error

    def event(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        row = {"time": time.time(), "kind": kind, "text": text, **facts}
        self._write(self._events, row)

    def discard(self) -> None:
        """The run never began: leave no trace of it."""
        self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        for file in (self._metrics, self._events):
            # What could not be written was told when it happened.
            with contextlib.suppress(OSError):
                file.close()


def _free_name(folder: Path, job_name: str) -> str:
    stem = f"{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
    return next(name for name in names if not (folder / name).exists())
