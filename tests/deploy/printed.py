"""What `w5xde deploy` prints, as a test reads it."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import yaml

from w5xde.cli.main import main

IMAGE = "registry.example/w5xde:1"


def printed(*words: str) -> str:
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["deploy", *words]) == 0
    return out.getvalue()


def documents(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The objects in a file for Kubernetes, by kind and name."""
    found = [each for each in yaml.safe_load_all(text) if each is not None]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def typed_lines(text: str, beginning: str) -> list[str]:
    """The lines of a comment that a user should type, which begin so."""
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#   ")]
    return [line for line in lines if line.startswith(beginning)]
