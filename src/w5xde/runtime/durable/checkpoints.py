"""Checkpoints on the disk: each is a folder that exists completely or not at all.

    checkpoints/step-000000500/model.safetensors …     the files
    checkpoints/step-000000500/manifest.json           their lengths and hashes, sealed; written last

The store writes a checkpoint under a temporary name (`stage`), then syncs it, renames it and reads it back
(`commit`); only then does it remove an older one. It renames a damaged one and uses the one before. Files
are written and checked in pieces, so that none is ever whole in memory. Knows neither models nor cuts.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from w5xde.runtime.durable.disk import Appender, Disk, HashedPieces, Piece, read_pieces
from w5xde.runtime.durable.sealed_json import Damaged, parse, seal, unseal

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 1
KEEP_MIN = 3
_NAME = re.compile(r"step-(\d{9,})")
_DAMAGED = re.compile(r"damaged-step-(\d{9,})")


class _ListedFile(msgspec.Struct, frozen=True):
    bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    version: int
    files: dict[str, _ListedFile]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint whose files were all checked against their hashes."""

    version: int
    # The hash of its manifest, which holds the hashes of all its files.
    sha256: str
    facts: dict[str, Any]
    files: Mapping[str, bytes]


class _StoredFiles(Mapping[str, bytes]):
    """The files of a checkpoint by name; each is read when it is asked for, and not kept."""

    def __init__(self, disk: Disk, folder: str, names: Iterable[str]) -> None:
        self._disk, self._folder, self._names = disk, folder, list(names)

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return self._disk.read(f"{self._folder}/{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(slots=True)
class StagedCheckpoint:
    """A checkpoint under a temporary name, whose files are written and not yet synced."""

    version: int
    facts: dict[str, Any]
    # Its hash if it is whole on the disk already, under its own name.
    sha256: str = ""
    listed: dict[str, _ListedFile] = field(default_factory=dict)
    # The files, open: only who wrote a file is sure to hear that it could not be synced.
    open_files: list[Appender] = field(default_factory=list)

    @property
    def folder(self) -> str:
        return f"{FOLDER}/writing-{self.version:09}"

    def close(self) -> None:
        while self.open_files:
            self.open_files.pop().close()


class CheckpointStore:
    """All checkpoints of a run."""

    def __init__(self, disk: Disk, keep: int = KEEP_MIN) -> None:
        self._disk = disk
        self._keep = keep

    @property
    def last_good(self) -> str:
        """Name the newest checkpoint in words; checkpoints hold only states with finite numbers."""
        versions = self.versions()
        return f"the last good checkpoint is step-{versions[-1]:09}" if versions else "there is no checkpoint"

    def versions(self) -> list[int]:
        """Return the versions of all checkpoints, oldest first, whole or damaged."""
        return sorted(int(match[1]) for name in self._disk.names(FOLDER) if (match := _NAME.fullmatch(name)))

    def save(self, version: int, files: Mapping[str, Iterable[Piece]], facts: Mapping[str, Any]) -> str:
        """Write a checkpoint, read it back, and return its hash; after an OSError there is none."""
        return self.commit(self.stage(version, files, facts), {})

    def stage(
        self, version: int, files: Mapping[str, Iterable[Piece]], facts: Mapping[str, Any]
    ) -> StagedCheckpoint:
        """Write the files under a temporary name, and sync nothing; then `commit` or `discard` it."""
        disk, staged = self._disk, StagedCheckpoint(version, dict(facts))
        if FOLDER not in disk.names():
            disk.make_folder(FOLDER)
        if version in self.versions():
            try:
                staged.sha256 = self.read(version).sha256
                return staged
            except Damaged:
                self._keep_aside(version)
        for leftover in disk.names(FOLDER):
            if leftover.startswith(("writing-", "removing-")):
                disk.remove(f"{FOLDER}/{leftover}")
        try:
            disk.make_folder(staged.folder)
            for name, pieces in files.items():
                file, hashed = disk.create(f"{staged.folder}/{name}"), HashedPieces(pieces)
                staged.open_files.append(file)
                for piece in hashed:
                    file.write(piece)
                staged.listed[name] = _ListedFile(hashed.bytes, hashed.sha256)
        except OSError:
            self.discard(staged)
            raise
        return staged

    def commit(self, staged: StagedCheckpoint, facts: Mapping[str, Any]) -> str:
        """Make a staged checkpoint durable, with more facts; read it back, and return its hash."""
        disk, version = self._disk, staged.version
        # Earlier calls may have failed to sync these names.
        disk.sync_folder()
        if staged.sha256:
            disk.sync_folder(FOLDER)
            return staged.sha256
        try:
            for file in staged.open_files:
                file.sync()
            # Before it is renamed: Windows renames no folder with open files.
            staged.close()
            manifest = _Manifest(FORMAT, version, staged.listed, staged.facts | dict(facts))
            line, _ = seal(msgspec.json.encode(manifest))
            disk.write(f"{staged.folder}/{MANIFEST}", [line + b"\n"])
            disk.sync_folder(staged.folder)
            disk.rename(staged.folder, _name(version))
        except OSError:
            self.discard(staged)
            raise
        disk.sync_folder(FOLDER)
        try:
            sha256 = self.read(version).sha256
        except Damaged as damage:
            raise OSError(errno.EIO, f"what was written cannot be read back: {damage}") from damage
        self._prune()
        return sha256

    def discard(self, staged: StagedCheckpoint) -> None:
        """Remove a checkpoint that will not be committed: half of one must not keep a full disk full."""
        staged.close()
        if not staged.sha256:
            with contextlib.suppress(OSError):
                self._disk.remove(staged.folder)

    def read(self, version: int) -> Checkpoint:
        """Return a checkpoint with every byte checked; raise Damaged if a byte is not as it was written."""
        disk, name = self._disk, _name(version)
        try:
            line = disk.read(f"{name}/{MANIFEST}")
            if not line.endswith(b"\n"):
                raise Damaged(f"{MANIFEST} is cut short")
            content, sha256 = unseal(line[:-1])
            manifest = parse(content, _Manifest)
        except OSError as error:
            raise Damaged(f"{MANIFEST} cannot be read: {error.strerror or error}") from error
        except Damaged as damage:
            raise Damaged(f"{MANIFEST}: {damage}") from None
        if manifest.format != FORMAT:
            raise Damaged(f"its format is {manifest.format}; this w5xde reads {FORMAT}")
        if manifest.version != version:
            raise Damaged(f"it says that it is of version {manifest.version}")
        listed = manifest.files
        there = set(disk.names(name)) - {MANIFEST}
        if there != set(listed):
            odd = sorted(there ^ set(listed))
            raise Damaged(f"{', '.join(odd)} {'are' if len(odd) > 1 else 'is'} missing, or too much")
        for file, each in listed.items():
            self._check_file(f"{name}/{file}", each)
        return Checkpoint(version, sha256, manifest.facts, _StoredFiles(disk, name, listed))

    def _check_file(self, name: str, listed: _ListedFile) -> None:
        file, hashed = name.rpartition("/")[2], HashedPieces(read_pieces(self._disk, name))
        try:
            for _ in hashed:
                pass
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error.strerror or error}") from error
        if hashed.bytes != listed.bytes:
            raise Damaged(f"{file} has {hashed.bytes} bytes, not {listed.bytes}")
        if hashed.sha256 != listed.sha256:
            raise Damaged(f"{file} is not what was written: its sha256 differs")

    def find_whole(self) -> tuple[Checkpoint | None, dict[int, str]]:
        """Return the newest whole checkpoint, and the damage of newer ones by version."""
        damaged: dict[int, str] = {}
        for version in reversed(self.versions()):
            try:
                return self.read(version), damaged
            except Damaged as damage:
                damaged[version] = f"step-{version:09}: {damage}"
        return None, damaged

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Do the same and rename damaged checkpoints, so that none is taken for a checkpoint again."""
        # A life that renamed one may have died before its ledger said so.
        known = [
            (int(match[1]), name) for name in self._disk.names(FOLDER) if (match := _DAMAGED.match(name))
        ]
        checkpoint, damaged = self.find_whole()
        for version in damaged:
            self._keep_aside(version)
        passed_over = [name for version, name in known if checkpoint is None or version > checkpoint.version]
        if checkpoint is not None:
            # Its writer may have died before its name was durable, and the run now relies on it.
            self._disk.sync_folder()
            self._disk.sync_folder(FOLDER)
        return checkpoint, [*damaged.values(), *passed_over]

    def _keep_aside(self, version: int) -> None:
        taken = self._disk.names(FOLDER)
        stem = f"damaged-step-{version:09}"
        name = next(n for n in [stem, *(f"{stem}-{i}" for i in range(2, 1000))] if n not in taken)
        self._disk.rename(_name(version), f"{FOLDER}/{name}")
        self._disk.sync_folder(FOLDER)

    def _prune(self) -> None:
        for version in self.versions()[: -self._keep]:
            # Renamed first: a half removed folder must not be taken for a damaged checkpoint.
            removing = f"{FOLDER}/removing-{version:09}"
            self._disk.rename(_name(version), removing)
            self._disk.sync_folder(FOLDER)
            self._disk.remove(removing)


def _name(version: int) -> str:
    return f"{FOLDER}/step-{version:09}"
