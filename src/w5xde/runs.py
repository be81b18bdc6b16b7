"""Finds a run by its name or folder, and reads its manifest. Knows no torch, and no other file of a run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from w5xde.errors import StorageError

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
METRICS = "metrics.jsonl"
TRACE = "trace.jsonl"
# The weights of the best evaluation so far, if a callback keeps them.
BEST = "best.safetensors"
LATEST = "latest"
# `--resume auto`: begin the run of this name, go on with it, or find that it is complete.
AUTO = "auto"
# How many runs a message names.
_NAMED_MAX = 5
# Where keys and credentials are kept; see runtime/admission/private_files.py.
STATE_VARIABLE = "W5XDE_STATE"
# Where nodes keep samples; see runtime/node/sample_cache.py.
CACHE_VARIABLE = "W5XDE_CACHE"


def find_run(runs: str, name: str) -> Path:
    """Return the folder of a run, given its name, a path to it, or `latest`."""
    if name == LATEST:
        found = [path for path in Path(runs).glob("*") if (path / MANIFEST).is_file()]
        if not found:
            raise StorageError(f"there is no run in {runs}", code="W5-401", fix="name its folder with --runs")
        return max(found, key=_touched).resolve()
    for folder in (Path(runs) / name, Path(name)):
        if (folder / MANIFEST).is_file():
            return folder.resolve()
    raise StorageError(
        f"there is no run {name} in {runs}",
        code="W5-401",
        fix=f"{_known(runs)}, or name their folder with --runs",
    )


def _touched(folder: Path) -> float:
    """Return when a file of the run last changed."""
    times = [0.0]
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # a running coordinator also removes files
            times.append(path.stat().st_mtime)
    return max(times)


def _known(runs: str) -> str:
    """Return a sentence that names the runs that changed last."""
    found = sorted((path.parent for path in Path(runs).glob(f"*/{MANIFEST}")), key=_touched, reverse=True)
    if not found:
        return "start one with  w5xde train"
    names = ", ".join(folder.name for folder in found[:_NAMED_MAX])
    more = len(found) - _NAMED_MAX
    return f"the newest runs here are {names} (and {more} more)" if more > 0 else f"runs here are {names}"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run: the settings that it was started with, and its result."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StorageError(
            f"{folder / MANIFEST} cannot be read: {error}", code="W5-401", fix="restore it from a copy"
        ) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("settings"), dict):
        raise StorageError(
            f"{folder / MANIFEST} is not the manifest of a run", code="W5-401", fix="name another run"
        )
    return manifest


def free_name(folder: Path, stem: str) -> str:
    """Return a name that begins with `stem` and that no run in `folder` has."""
    names = [stem, *(f"{stem}-{i}" for i in range(2, 1000))]
    return next(name for name in names if not (folder / name).exists())
