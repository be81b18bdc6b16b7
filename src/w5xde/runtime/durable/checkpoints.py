"""Checkpoints on the disk: each is a folder that exists completely or not at all.

    checkpoints/step-000000500/model.safetensors …     the files
    checkpoints/step-000000500/manifest.json           their lengths and hashes, sealed; written last

The store writes a checkpoint under a temporary name, syncs it, renames it and reads it back; only then does
it remove an older one. It renames a damaged one and uses the one before. Knows neither models nor cuts.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from w5xde.runtime.durable.disk import Disk, Piece
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
    files: dict[str, bytes]


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
        disk, name = self._disk, _name(version)
        aside = f"{FOLDER}/writing-{version:09}"
        if FOLDER not in disk.names():
            disk.make_folder(FOLDER)
        disk.sync_folder()
        if name.removeprefix(f"{FOLDER}/") in disk.names(FOLDER):
            try:
                sha256 = self.read(version).sha256
                # An earlier call may have failed to sync its name.
                disk.sync_folder(FOLDER)
                return sha256
            except Damaged:
                self._keep_aside(version)
        for leftover in disk.names(FOLDER):
            if leftover.startswith(("writing-", "removing-")):
                disk.remove(f"{FOLDER}/{leftover}")
        try:
            self._write(aside, version, files, facts)
            disk.rename(aside, name)
        except OSError:
            # Half a checkpoint must not keep a full disk full.
            with contextlib.suppress(OSError):
                disk.remove(aside)
            raise
        disk.sync_folder(FOLDER)
        try:
            sha256 = self.read(version).sha256
        except Damaged as damage:
            raise OSError(errno.EIO, f"what was written cannot be read back: {damage}") from damage
        self._prune()
        return sha256

    def _write(
        self, aside: str, version: int, files: Mapping[str, Iterable[Piece]], facts: Mapping[str, Any]
    ) -> None:
        disk = self._disk
        disk.make_folder(aside)
        listed = {}
        for file, pieces in files.items():
            counted = _HashedPieces(pieces)
            disk.write(f"{aside}/{file}", counted)
            listed[file] = _ListedFile(counted.bytes, counted.digest.hexdigest())
        manifest = _Manifest(FORMAT, version, listed, dict(facts))
        line, _ = seal(msgspec.json.encode(manifest))
        disk.write(f"{aside}/{MANIFEST}", [line + b"\n"])
        disk.sync_folder(aside)

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
        files = {file: self._read_file(f"{name}/{file}", each) for file, each in listed.items()}
        return Checkpoint(version, sha256, manifest.facts, files)

    def _read_file(self, name: str, listed: _ListedFile) -> bytes:
        file = name.rpartition("/")[2]
        try:
            data = self._disk.read(name)
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error.strerror or error}") from error
        if len(data) != listed.bytes:
            raise Damaged(f"{file} has {len(data)} bytes, not {listed.bytes}")
        if hashlib.sha256(data).hexdigest() != listed.sha256:
            raise Damaged(f"{file} is not what was written: its sha256 differs")
        return data

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


class _HashedPieces:
    """Yields pieces and counts their length and hash."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = pieces
        self.bytes = 0
        self.digest = hashlib.sha256()

    def __iter__(self) -> Any:
        for piece in self._pieces:
            self.bytes += memoryview(piece).nbytes
            self.digest.update(piece)
            yield piece
