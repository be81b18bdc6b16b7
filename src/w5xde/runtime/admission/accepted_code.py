"""Code of coordinators that this user agreed to run: remembered, and kept in private folders.

    STATE/nodes/POOL/code.json     the hashes that were accepted from the coordinator of this pool
    STATE/code/SHA256/train.py …   the files with this hash, for their owner alone

A folder holds exactly the files that were shown, or is made anew: nothing that lies there besides, such as
compiled files, is ever run. Knows no messages and asks nobody.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from w5xde.errors import StorageError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.runtime.admission import private_files
from w5xde.runtime.durable.sealed_json import Damaged, seal, unseal

# Far more versions of its job than a coordinator has; the oldest are forgotten, and asked about again.
HASHES_MAX = 1000
# Folders that no node has used for this long are removed: the code comes again with the run.
KEPT_SECONDS = 30 * 24 * 3600.0


class _AcceptedHashes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: list[str]


class AcceptedCode:
    """What was accepted from one coordinator."""

    def __init__(self, pool: str, state: Path | None = None) -> None:
        self._state = state or private_files.state_folder()
        folder = private_files.make_folder(self._state, "nodes", pool)
        self._file, self._lock = folder / "code.json", folder / "code.lock"

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._read()

    def remember(self, sha256: str) -> None:
        """Accept this code from now on without a question."""
        with private_files.locked(self._lock):
            others = [each for each in self._read() if each != sha256]
            kept = _AcceptedHashes([*others, sha256][-HASHES_MAX:])
            private_files.replace(self._file, seal(msgspec.json.encode(kept))[0])

    def _read(self) -> list[str]:
        try:
            return msgspec.json.decode(unseal(private_files.read(self._file))[0], type=_AcceptedHashes).sha256
        except (FileNotFoundError, Damaged, msgspec.DecodeError):
            # Who is asked once more than needed loses nothing.
            return []


def store(bundle: CodeBundle, state: Path | None = None) -> Path:
    """Write the files of a bundle, if they are not there already; returns their folder."""
    base = private_files.make_folder(state or private_files.state_folder(), "code")
    folder = base / bundle.sha256
    with private_files.locked(base / "lock"):
        _remove_old(base, time.time())
        if not _is_exactly(folder, bundle):
            _write(folder, bundle)
        with contextlib.suppress(OSError):
            os.utime(folder)
    return folder


def _write(folder: Path, bundle: CodeBundle) -> None:
    try:
        if folder.is_symlink() or folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be made anew: {error.strerror}", code="W5-411", fix="remove it by hand"
        ) from error
    for name, content in bundle.files.items():
        *folders, last = name.split("/")
        private_files.replace(private_files.make_folder(folder, *folders) / last, content)


def _is_exactly(folder: Path, bundle: CodeBundle) -> bool:
    """Whether a folder has these files with these contents, and nothing else but the folders they lie in."""
    folders = {name.rpartition("/")[0] for name in bundle.files}
    folders |= {above.as_posix() for each in folders for above in Path(each).parents}
    try:
        found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
        contents = {name: private_files.read(path) for name, path in found.items() if name not in folders}
    except (OSError, StorageError):
        # Gone, a link, another user's, or open to others.
        return False
    return contents == bundle.files


def _remove_old(base: Path, now: float) -> None:
    """Remove folders that were not used for long; one that cannot be removed stays."""
    for folder in base.iterdir():
        with contextlib.suppress(OSError):
            if folder.is_dir() and now - folder.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
