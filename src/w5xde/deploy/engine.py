"""What every engine of `w5xde deploy` gives: its help, its flags, and the function that writes its files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from w5xde.deploy.files import DeployFile
from w5xde.deploy.request import DeployRequest


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine as a command: `w5xde deploy NAME JOB`."""

    about: str
    examples: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    # Given the request and the engine's own flags; raises UserError for what the engine cannot do.
    write: Callable[[DeployRequest, argparse.Namespace], list[DeployFile]]
