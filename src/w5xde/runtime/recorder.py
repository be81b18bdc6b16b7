"""The run folder: what is kept of a run, readable by anybody without w5xde.

runs/NAME/manifest.json       what was run: settings, versions, model, result
runs/NAME/metrics.jsonl       one object every moment: step, loss, rates, nodes
runs/NAME/events.jsonl        one object per event: who joined, left, failed, and when
runs/NAME/model.safetensors   the trained weights
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

import w5xde
from w5xde.config import Settings
from w5xde.errors import StorageError


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
        aside.write_text(json.dumps(self._facts, indent=2) + "\n", encoding="utf-8")
        aside.replace(path)

    def metrics(self, row: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(row) + "\n")

    def event(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        row = {"time": time.time(), "kind": kind, "text": text, **facts}
        self._events.write(json.dumps(row) + "\n")

    def discard(self) -> None:
        """The run never began: leave no trace of it."""
        self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


def _free_name(folder: Path, job_name: str) -> str:
    stem = f"{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
    return next(name for name in names if not (folder / name).exists())
