"""The values of flags that several engines have. Knows no engine."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from w5xde.specs.durations import parse_duration


def whole(least: int, most: int) -> Callable[[str], int]:
    """Read a whole number between two limits."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return read


def add_nodes(command: argparse.ArgumentParser, default: int, text: str) -> None:
    """Add --nodes: how many processes the engine starts that compute."""
    # As many as `w5xde serve` takes.
    command.add_argument(
        "--nodes", type=whole(1, 1000), default=default, metavar="N", help=f"{text} (default: {default})"
    )


def add_port(command: argparse.ArgumentParser) -> None:
    """Add --port: where the coordinator listens."""
    text = "port of the coordinator (default: 5555)"
    command.add_argument("--port", type=whole(1024, 65535), default=5555, metavar="N", help=text)


def duration_seconds(text: str) -> int:
    """Read a duration: `90m`, `12h` or `7d`."""
    try:
        seconds = round(parse_duration(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, like 90m, 12h or 7d") from None
    if seconds < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a second")
    return seconds
