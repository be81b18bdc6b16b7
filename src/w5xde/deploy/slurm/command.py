"""Slurm: what can be chosen and what is refused. `scripts.py` has the texts."""

from __future__ import annotations

import argparse
import re
from pathlib import Path, PurePosixPath

from w5xde.deploy.engine import Engine
from w5xde.deploy.files import DeployFile
from w5xde.deploy.flags import add_nodes, whole
from w5xde.deploy.request import DeployRequest
from w5xde.deploy.slurm.scripts import (
    NOT_SHARED,
    SlurmResources,
    SlurmRun,
    nodes_script,
    pool_script,
    submit_script,
)
from w5xde.errors import UsageError
from w5xde.specs.durations import parse_wait
from w5xde.specs.setting_error import SettingError

_EXAMPLES = """examples:
  w5xde deploy slurm train.py --nodes 16 --runs /shared/runs --out slurm && slurm/submit.sh
  w5xde deploy slurm train.py --nodes 64 --at-most 32 --nodes-partition preempt --runs /shared/runs
  w5xde deploy slurm train.py --nodes 8 --gpus-per-node 4 --cpus-per-node 16 --time 12:00:00 --account physics
  w5xde deploy slurm train.py --setup 'module load python' --sbatch=--qos=low --out slurm -- --epochs 5"""
# What Slurm takes as the name of a partition or an account; partitions may be several, with commas.
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}"
_NAMES = re.compile(rf"{_NAME}(,{_NAME})*")
# No quotes, blanks, dollars or comments: sbatch reads these lines by rules of its own.
_OPTION = re.compile(r"--([a-z][a-z-]*)(=[A-Za-z0-9_.,:;@%/+*&|()\[\]!^-]+)?")
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"(?:(?P<days>\d{1,4})-)?(?P<parts>\d{1,6}(?::\d{1,2}){0,2})")
# Options of sbatch that the files give themselves, and what to do instead.
_DECIDED = {
    **dict.fromkeys(("array", "nodes", "ntasks"), "give --nodes and --at-most"),
    "cpus-per-task": "give --cpus-per-node",
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), "give --gpus-per-node"),
    "partition": "give --partition and --nodes-partition",
    "account": "give --account",
    "time": "give --time",
    "signal": "give --warning",
    "job-name": "give --name",
    "chdir": "the jobs start in the folder in which you are now",
    **dict.fromkeys(("output", "error", "open-mode"), "logs are written beside the files"),
    **dict.fromkeys(("requeue", "no-requeue", "dependency", "wrap"), "restarts depend on it"),
}
# Folders that each host of a cluster has for itself.
_OWN_TO_A_HOST = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# w5xde ends in order within 20 s, and the shell around it needs a moment to queue the job again.
WARNING_SECONDS_MIN = 30
WARNING_SECONDS = 120


def _option(text: str) -> str:
    found = _OPTION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not like --qos=low: one option of sbatch, without blanks"
        )
    if found[1] in _DECIDED:
        raise argparse.ArgumentTypeError(f"the files decide --{found[1]} themselves: {_DECIDED[found[1]]}")
    return text


def _names(text: str) -> str:
    if not _NAMES.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that Slurm knows, like gpu or gpu,preempt")
    return text


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not one line of a shell script")
    return text


def _wait(text: str) -> str:
    try:
        parse_wait(text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def time_seconds(text: str) -> int:
    """Read a time limit as Slurm writes it."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 90, 12:00:00 or 2-12:00:00 (days-hours:…)")
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(found["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    # One number means minutes, two mean minutes and seconds.
    hours, minutes, seconds = (0, *parts, 0)[:3] if len(parts) < 3 else parts
    return hours * 3600 + minutes * 60 + seconds


def _add_flags(command: argparse.ArgumentParser) -> None:
    add_nodes(command, 2, "elements of the array, each of which computes on one host")
    text = "how many of them run at the same time (default: as many as Slurm lets)"
    command.add_argument("--at-most", type=whole(1, 1000), metavar="M", help=text)
    text = "cores of each element; it runs a process for every --threads of them (default: 1)"
    command.add_argument("--cpus-per-node", type=whole(1, 1024), default=1, metavar="N", help=text)
    text = "GPUs of each element; it runs a process for each (default: 0)"
    command.add_argument("--gpus-per-node", type=whole(0, 64), default=0, metavar="N", help=text)
    text = "cores of the coordinator (default: 2)"
    command.add_argument("--coordinator-cpus", type=whole(1, 1024), default=2, metavar="N", help=text)
    text = "partition of the coordinator, best one without preemption (default: Slurm's)"
    command.add_argument("--partition", type=_names, metavar="NAME", help=text)
    text = "partition of the nodes (default: the coordinator's)"
    command.add_argument("--nodes-partition", type=_names, metavar="NAME", help=text)
    command.add_argument("--account", type=_names, metavar="NAME", help="account that is charged")
    text = "time limit of each start of a job: 90 (minutes), 12:00:00, 2-00 … (default: the partition's)"
    command.add_argument("--time", metavar="TIME", help=text)
    text = f"seconds before the time limit at which the jobs are told (default: {WARNING_SECONDS})"
    command.add_argument(
        "--warning", type=whole(WARNING_SECONDS_MIN, 3600), default=WARNING_SECONDS, metavar="N", help=text
    )
    text = "folder of runs, on storage that all hosts share (default: runs, here)"
    command.add_argument("--runs", default="runs", metavar="DIR", help=text)
    text = "Slurm has this one host: the folder of runs may be any"
    command.add_argument("--one-host", action="store_true", help=text)
    text = "how long a node waits for a coordinator that is queued again, like 30m or forever (default: 1h)"
    command.add_argument("--wait", type=_wait, default="1h", metavar="TIME", help=text)
    text = "port of the coordinator (default: any free one)"
    command.add_argument("--port", type=whole(1024, 65535), default=0, metavar="N", help=text)
    text = "a line for both scripts before w5xde starts, like 'module load python'; may be repeated"
    command.add_argument("--setup", type=_line, action="append", default=[], metavar="LINE", help=text)
    text = "one more option of sbatch, like --sbatch=--qos=low; may be repeated"
    command.add_argument("--sbatch", type=_option, action="append", default=[], metavar="OPTION", help=text)
    text = "the same for the nodes alone, like --nodes-sbatch=--constraint=v100"
    command.add_argument(
        "--nodes-sbatch", type=_option, action="append", default=[], metavar="OPTION", help=text
    )


def _write(request: DeployRequest, given: argparse.Namespace) -> list[DeployFile]:
    runs = Path(given.runs).expanduser().absolute()
    if not given.one_host:
        _require_shared("--runs", runs)
        if request.job.file is not None:
            _require_shared("the job file", request.job.file)
    more, partition = tuple(given.sbatch), given.nodes_partition or given.partition
    nodes_more = (*more, *given.nodes_sbatch)
    run = SlurmRun(
        request=request,
        runs=str(runs),
        folder=str(Path.cwd()),
        pool=SlurmResources(given.coordinator_cpus, 0, given.partition, more),
        node=SlurmResources(given.cpus_per_node, given.gpus_per_node, partition, nodes_more),
        array=_array(given.nodes, given.at_most),
        nodes_of_element=given.gpus_per_node or max(1, given.cpus_per_node // request.threads),
        wait=given.wait,
        port=given.port,
        warning_seconds=_warning(given.time, given.warning),
        time=given.time,
        account=given.account,
        setup=tuple(given.setup),
    )
    return [
        DeployFile("pool.sbatch", pool_script(run)),
        DeployFile("nodes.sbatch", nodes_script(run)),
        DeployFile("submit.sh", submit_script(run), is_executable=True),
    ]


def _array(nodes: int, at_most: int | None) -> str:
    return f"1-{nodes}" if at_most is None or at_most >= nodes else f"1-{nodes}%{at_most}"


def _warning(time: str | None, warning_seconds: int) -> int:
    """Check that the time limit leaves time to train before the warning."""
    if time is not None:
        try:
            seconds = time_seconds(time)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--time {error}", code="W5-620", fix="--time 12:00:00") from error
        if seconds <= warning_seconds:
            raise UsageError(
                f"--time {time} is {seconds} s, and the jobs are told {warning_seconds} s before",
                code="W5-620",
                why="they would be told to end as soon as they start, again and again",
                fix="give a longer --time, or a shorter --warning",
            )
    return warning_seconds


def _require_shared(what: str, place: Path) -> None:
    """Refuse folders that are certainly not shared; jobs check the others when they start."""
    for folder in _OWN_TO_A_HOST:
        if PurePosixPath(place).is_relative_to(folder):
            raise UsageError(
                f"{what} is {place}, and every host has a {folder} of its own",
                code=NOT_SHARED,
                why="coordinator and nodes run on several hosts, and meet in the folder of runs",
                fix="name a folder that all hosts share, or --one-host if Slurm has only this one",
            )


SLURM = Engine(
    "a job for the coordinator and an array of jobs for the nodes, which Slurm may requeue and preempt",
    _EXAMPLES,
    _add_flags,
    _write,
)
