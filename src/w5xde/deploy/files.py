"""The files that `w5xde deploy` makes, printed or written into a folder. Knows no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from w5xde.errors import StorageError


@dataclass(frozen=True, slots=True)
class DeployFile:
    """One file of a deployment."""

    name: str
    text: str
    is_executable: bool = False
    # A file for another tool than the one that reads the printed files: it is written with --out alone.
    only_with_out: bool = False


def print_files(files: Sequence[DeployFile], out: IO[str]) -> None:
    """Print the files; several are set apart by comments with their names."""
    printed = [each for each in files if not each.only_with_out]
    for each in printed:
        if len(printed) > 1:
            print(f"# ===== {each.name} =====", file=out)
        print(each.text, file=out, end="" if each is printed[-1] else "\n")
    out.flush()


def write_files(files: Sequence[DeployFile], folder: Path) -> list[Path]:
    """Write the files into a folder; refuse to replace a file that has other contents."""
    places = [folder / each.name for each in files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each, place in zip(files, places, strict=True):
            with contextlib.suppress(FileNotFoundError):
                if place.read_bytes() != each.text.encode():
                    raise StorageError(
                        f"{place} exists, with other contents",
                        code="W5-635",
                        why="it may hold changes of yours",
                        fix="remove it, or write into another folder with --out",
                    )
        for each, place in zip(files, places, strict=True):
            place.write_text(each.text, encoding="utf-8")
            place.chmod(0o755 if each.is_executable else 0o644)
    except OSError as error:
        raise StorageError(
            f"the files cannot be written into {folder}: {error}",
            code="W5-635",
            fix="name another folder with --out",
        ) from error
    return places
