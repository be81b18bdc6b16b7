"""`w5xde deploy systemd`: what can be chosen and what is refused. `units.py` has the texts."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from w5xde.deploy.code import code_of_job
from w5xde.deploy.engine import Engine
from w5xde.deploy.files import DeployFile
from w5xde.deploy.flags import add_port
from w5xde.deploy.request import DeployRequest
from w5xde.deploy.systemd.units import RunUnits, coordinator_unit, node_unit
from w5xde.errors import UsageError

_EXAMPLES = """examples:
  w5xde deploy systemd train.py --advertise 192.168.1.20 --out units
  w5xde deploy systemd train.py --advertise pool.lan --w5xde /opt/w5xde/bin/w5xde --out units -- --epochs 5
  w5xde deploy systemd train.py --advertise pool.lan --read /home/me/images --gpus"""
# Lists in units are split at blanks and colons; no path that people give to programs needs the others.
_PATH = re.compile(r"/[^\s:\"'\\;$\x00-\x1f]*")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?")
# The folder with the package, which is not in the environment if it was installed to be edited.
_SOURCES = Path(__file__).parents[3]
# What the sandbox of the units hides: home directories, and temporary files of others.
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")


def _add_flags(command: argparse.ArgumentParser) -> None:
    text = "name or address by which nodes reach the coordinator's machine"
    command.add_argument("--advertise", required=True, metavar="HOST", help=text)
    add_port(command)
    text = "the command w5xde on the machines, a path (default: the one that runs now)"
    command.add_argument(
        "--w5xde", default=str(Path(sys.prefix) / "bin" / "w5xde"), metavar="PATH", help=text
    )
    text = "a folder under /home or /tmp that the job reads, such as its data; may be given several times"
    command.add_argument("--read", action="append", default=[], metavar="DIR", help=text)
    command.add_argument("--gpus", action="store_true", help="let the units use NVIDIA GPUs")


def _write(request: DeployRequest, given: argparse.Namespace) -> list[DeployFile]:
    if not _HOST.fullmatch(given.advertise):
        raise UsageError(
            f"{given.advertise!r} is not the name or address of a machine",
            code="W5-631",
            fix="--advertise 192.168.1.20, or a name that the nodes' machines can look up",
        )
    code = code_of_job(request)
    command = _usable(given.w5xde)
    folders = [_usable(each) for each in given.read]
    job_folders = [_job_folder(request.job.file)] if request.job.file is not None else []
    units = RunUnits(
        request=request,
        command=command,
        host=given.advertise,
        port=given.port,
        folder=job_folders[0] if job_folders else "/",
        visible=_hidden_ones([*job_folders, *folders, *_program(command)]),
        node_visible=_hidden_ones([*folders, *_program(command)]),
        code_sha256=code.sha256 if code is not None else None,
        uses_gpus=given.gpus,
    )
    return [
        DeployFile(f"{units.name}.service", coordinator_unit(units)),
        DeployFile(f"{units.name}-node.service", node_unit(units)),
    ]


def _usable(path: str) -> str:
    """A path as units can name it."""
    if not _PATH.fullmatch(path):
        raise UsageError(
            f"{path!r} cannot be named in a unit",
            code="W5-638",
            why="paths there begin with / and have no blanks, quotes, colons, semicolons, backslashes or $",
            fix="give the whole path, or move the files to such a place",
        )
    return path


def _job_folder(file: Path) -> str:
    """The folder of the job file, which every user must be able to read: the unit's user is made for it."""
    folder = _usable(str(file.parent))
    if file.stat().st_mode & 0o004 and file.parent.stat().st_mode & 0o001:
        return folder
    raise UsageError(
        f"the unit's user cannot read {file}",
        code="W5-639",
        why="the unit has a user of its own (DynamicUser), and the file or its folder is closed to others",
        fix=f"chmod o+r {file} && chmod o+x {folder}",
    )


def _program(command: str) -> list[str]:
    """The folders of the program w5xde: its environment and, if it is this one, what that builds on."""
    environment = Path(command).parent.parent
    if environment != Path(sys.prefix):
        return [str(environment)]
    return [str(environment), sys.base_prefix, str(_SOURCES)]


def _hidden_ones(folders: list[str]) -> tuple[str, ...]:
    """Those of the folders that the units could not see, the outermost alone."""
    hidden = sorted(
        {folder for folder in folders if folder.startswith(tuple(f"{each}/" for each in _HIDDEN))}
    )
    inner = {each for each in hidden for other in hidden if each.startswith(f"{other}/")}
    return tuple(folder for folder in hidden if folder not in inner)


SYSTEMD = Engine(
    "units for a coordinator and a node that come back after a crash or a reboot",
    _EXAMPLES,
    _add_flags,
    _write,
)
