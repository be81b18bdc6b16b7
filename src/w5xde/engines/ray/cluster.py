"""The Ray cluster: how to reach it, which hosts it has, and whether a run can work on all of them.

Refuses, before anything is placed, what would fail later on some host, each with a sentence. Knows no runs.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from w5xde.engines.ray.lookout import NAMESPACE
from w5xde.errors import StorageError, UsageError
from w5xde.specs.engine_settings import NODES_MAX, NodeRange

ADDRESS_VARIABLE = "RAY_ADDRESS"
# A head in the same network answers in milliseconds.
DIAL_SECONDS = 5.0
# A host on which a process starts in this time is well; a busy one is not asked, and may fail later.
LOOK_SECONDS = 30.0
# Hosts that an error names.
_NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class Needs:
    """What each node needs of its host."""

    cpus: float
    gpus: float
    labels: dict[str, str]

    def __str__(self) -> str:
        wants = [f"{self.cpus:g} CPUs"] if self.cpus else []
        wants += [f"{self.gpus:g} GPUs"] if self.gpus else []
        wants += [f"{key}={value}" for key, value in self.labels.items()]
        return ", ".join(wants)

    def options(self) -> dict[str, Any]:
        """The same, as options of an actor."""
        found: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        return found | ({"label_selector": self.labels} if self.labels else {})


@contextmanager
def connected() -> Iterator[None]:
    """Connect this process to the cluster that RAY_ADDRESS names, or that this machine belongs to."""
    if ray.is_initialized():
        # The program has connected itself, and stays so.
        yield
        return
    _connect()
    try:
        yield
    finally:
        ray.shutdown()


def _connect() -> None:
    address = os.environ.get(ADDRESS_VARIABLE) or "auto"
    if "://" in address:
        raise UsageError(
            f"{ADDRESS_VARIABLE} {address} is an address of Ray Client, through which no run can be minded",
            code="W5-601",
            fix="submit it instead:  ray job submit --working-dir . -- w5xde train …",
        )
    if address != "auto":
        _require_answer(address)
    try:
        # Without an address Ray takes the one of the variable.
        ray.init(
            "auto" if address == "auto" else None,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(address, str(error).splitlines()[0]) from error


def _require_answer(address: str) -> None:
    """Refuse an address at which nothing answers: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), DIAL_SECONDS).close()
    except (OSError, ValueError) as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, why: str) -> UsageError:
    where = (
        "this machine belongs to no Ray cluster" if address == "auto" else f"no Ray cluster is at {address}"
    )
    return UsageError(
        where,
        code="W5-601",
        why=why,
        fix="start one:  ray start --head ; or on a host of a cluster name its head:  RAY_ADDRESS=HOST:6379",
    )


# --- hosts ----------------------------------------------------------------------------------------


def hosts() -> list[dict[str, Any]]:
    """The hosts of the cluster that are alive, as Ray describes them."""
    return [each for each in ray.nodes() if each["Alive"]]


def room_on(host: dict[str, Any], needs: Needs) -> int:
    """How many nodes a host has room for, if it had nothing else to do."""
    has = host["Resources"]
    labels = host.get("Labels") or {}
    if any(labels.get(key) != value for key, value in needs.labels.items()):
        return 0
    wanted = {"CPU": needs.cpus, "GPU": needs.gpus}
    return min([int(has.get(kind, 0) / much) for kind, much in wanted.items() if much] or [NODES_MAX])


def settle_range(wanted: NodeRange | None, needs: Needs) -> NodeRange:
    """How many nodes to place; refuses nodes that no host of the cluster can hold.

    Whether an autoscaler would bring such a host cannot be known: a range from 0 says that one will.
    """
    found = hosts()
    room = sum(room_on(each, needs) for each in found)
    if room == 0 and (wanted is None or wanted.least):
        most = [f"{each['NodeManagerHostname']} has {_resources_text(each)}" for each in found[:_NAMED_MAX]]
        raise UsageError(
            f"no host of the cluster has what a node needs ({needs}), so nodes would wait for ever",
            code="W5-605",
            why="; ".join(most),
            fix="ask for less with --cpus-per-node, --gpus-per-node or --labels; or, if an autoscaler brings"
            " such hosts, give a range from 0:  --nodes 0..8",
        )
    return wanted or NodeRange(max(1, min(room, NODES_MAX)), max(1, min(room, NODES_MAX)))


def _resources_text(host: dict[str, Any]) -> str:
    has = host["Resources"]
    parts = [f"{has.get('CPU', 0):g} CPUs", f"{has['GPU']:g} GPUs" if has.get("GPU") else ""]
    return " and ".join(filter(None, parts))


# --- what a run needs of every host ----------------------------------------------------------------


def folder_here(folder: str) -> Path:
    """The folder of a command on this host: the same path, or where Ray has copied the job's files to."""
    return Path(folder) if Path(folder).is_dir() else Path.cwd()


def look(token: str, folder: str, job_file: str) -> dict[str, Any]:
    """What a host sees of a run's storage and of its job's file; runs on that host."""
    has_job = not job_file or (folder_here(folder) / job_file).is_file()
    return {"token": Path(token).is_file(), "job": has_job}


@contextmanager
def _token_in(runs: Path) -> Iterator[Path]:
    """A file in a folder for as long as the block runs."""
    token = runs / f".seen-{secrets.token_hex(8)}"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise StorageError(
            f"the folder {runs} cannot be written: {error.strerror}",
            code="W5-404",
            fix="choose another folder with --runs",
        ) from error
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def require_hosts(runs: Path, folder: str, job_file: str) -> None:
    """Refuse hosts that do not see the run's folder or the job's file, or that lack w5xde."""
    asked = {each["NodeID"]: str(each["NodeManagerHostname"]) for each in hosts()}
    with _token_in(runs) as token:
        task = ray.remote(num_cpus=0, max_retries=0)(look)
        there = {
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(host, soft=False)).remote(
                str(token), folder, job_file
            ): name
            for host, name in asked.items()
        }
        done, late = ray.wait(list(there), num_returns=len(there), timeout=LOOK_SECONDS)
        for each in late:
            ray.cancel(each, force=True)
        found = {there[each]: seen for each in done if (seen := _seen(each, there[each])) is not None}
    blind = [name for name, seen in found.items() if not seen["token"]]
    if blind:
        raise StorageError(
            f"{_named(blind)} not see the folder {runs}",
            code="W5-602",
            why="a coordinator that is started again on another host goes on with what is in that folder",
            fix="name a folder on storage that all hosts share, for example  --runs /shared/runs",
        )
    lacking = [name for name, seen in found.items() if not seen["job"]]
    if lacking:
        raise UsageError(
            f"{_named(lacking)} not have the job's file {job_file}",
            code="W5-603",
            fix="put it on storage that all hosts share, or let Ray copy the folder:  ray job submit"
            " --working-dir . -- w5xde train …",
        )


def _seen(task: Any, host: str) -> dict[str, Any] | None:
    """What a host saw; None if it died meanwhile, which is no news here."""
    try:
        seen: dict[str, Any] = ray.get(task)
    except ray.exceptions.RayError as error:
        if "No module named" not in str(error):
            return None
        raise UsageError(
            f"{host} has no w5xde, or another version of it",
            code="W5-604",
            why=next(line for line in reversed(str(error).splitlines()) if "No module named" in line).strip(),
            fix="install it on every host:  pip install 'w5xde[ray]' ; or name an image that has it",
        ) from None
    return seen


def _named(names: list[str]) -> str:
    listed = ", ".join(sorted(set(names))[:_NAMED_MAX])
    return f"{listed} does" if len(names) == 1 else f"{len(names)} hosts ({listed}) do"
