"""Argument types of the flags of `w5xde bench`: numbers within bounds, lists, names and files.

Each function is a `type` for argparse, or makes one, so that bad values are refused before anything is
measured; `add_rows` and the like add flags that several benchmarks have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from w5xde.compression import parse_compress


def picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.absolute().parent}")
    return path


def number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= found <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be from {low:g} to {high:g}")
        return found

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """Also written like 25e6."""

    def parse(text: str) -> int:
        found = number(low, high)(text)
        if found != int(found):
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
        return int(found)

    return parse


# What a flag --seconds takes.
SECONDS = number(0.2, 3600.0)


def several(one: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Values joined by commas."""
    return lambda text: tuple(one(part.strip()) for part in text.split(","))


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return text

    return parse


def compression(text: str) -> str:
    """A value of the setting `compress`."""
    try:
        parse_compress(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_rows(command: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    """Add the flag that chooses some of these rows."""
    command.add_argument(
        "--rows",
        type=several(one_of(names)),
        default=names,
        metavar="ROW,…",
        help=f"some of {', '.join(names)} (default: all)",
    )


def add_seconds(command: argparse.ArgumentParser, default: float, text: str) -> None:
    """Add the flag that says how long something lasts."""
    command.add_argument(
        "--seconds", type=SECONDS, default=default, metavar="X", help=f"{text} (default: {default:g})"
    )


def add_pairs(command: argparse.ArgumentParser, default: int) -> None:
    """Add the flag that says how often two contestants take turns."""
    command.add_argument(
        "--pairs",
        type=whole(1, 1000),
        default=default,
        metavar="N",
        help=f"turns of both; the first of several is dropped (default: {default})",
    )


def add_runs(command: argparse.ArgumentParser) -> None:
    """Add the flag that keeps the runs of a benchmark."""
    command.add_argument("--runs", metavar="FOLDER", help="keep the run there (default: thrown away)")
