"""Starts a contestant on the hosts of a rig, waits until it has learnt, and ends all its processes."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any

import msgspec

from w5xde.bench.contestants.learners import SECONDS_MORE, LearnTask
from w5xde.bench.measure.curves import Curve
from w5xde.bench.measure.processes import OVERHEAD_SECONDS, CrewMember
from w5xde.bench.rig.entrants import Entrant
from w5xde.bench.rig.hosted import HostedTask
from w5xde.bench.rig.hosts import RigHost, moved_bytes
from w5xde.bench.rig.namespaces import Rig

# What every host runs.
HOST_MODULE = "w5xde.bench.rig.hosted"


def race(rig: Rig, entrant: Entrant, task: LearnTask, parameters: int, paced_seconds: float = 0.0) -> Curve:
    """Let one contestant learn a model of about so many parameters on all nodes of the rig."""
    shared = {name: getattr(task, name) for name in HostedTask.__struct_fields__ if name in task.__slots__}
    ready = HostedTask(
        **shared,
        parameters=parameters,
        learning_rate=entrant.learning_rate,
        nodes=len(rig.nodes),
        paced_seconds=paced_seconds,
        node_pids=tuple(rig.node_pids),
        bytes_before=moved_bytes(rig.node_pids),
    )
    with ExitStack() as stack:
        return (_race_peers if entrant.settings is None else _race_ours)(rig, entrant, ready, stack)


def _start(stack: ExitStack, host: RigHost, work: str, task: HostedTask, **given: Any) -> CrewMember:
    seconds = task.seconds_max + SECONDS_MORE + OVERHEAD_SECONDS
    member = host.start(work, {"task": msgspec.to_builtins(task), **given}, seconds)
    stack.callback(member.end)
    return member


def _race_peers(rig: Rig, entrant: Entrant, task: HostedTask, stack: ExitStack) -> Curve:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="w5xde-rig-"))
    given = {"method": entrant.name, "meeting": f"{folder}/gloo", "centre": rig.centre.address}
    if entrant.needs_torchft:
        _start(stack, rig.centre, "lighthouse", task, nodes=task.nodes).hear()
    members = [
        _start(stack, node, "peer", task, rank=rank, address=node.address, **given)
        for rank, node in enumerate(rig.nodes)
    ]
    return msgspec.convert(members[0].hear(), Curve)


def _race_ours(rig: Rig, entrant: Entrant, task: HostedTask, stack: ExitStack) -> Curve:
    settings = {
        "host": rig.centre.address,
        "nodes": 0,
        # A batch a step for each node, as DDP has it, unless the contestant has more; nobody sends samples.
        "batches_per_step": entrant.columns * task.nodes,
        "data": "local",
        "checkpoint_every": "off",
        # A recorded batch would not sleep.
        "recording": "off" if task.paced_seconds else "auto",
        **(entrant.settings or {}),
    }
    coordinator = _start(stack, rig.centre, "coordinator", task, settings=settings)
    ticket = coordinator.hear()
    for number, node in enumerate(rig.nodes):
        named = {"node_name": f"home-{number + 1}"}
        _start(stack, node, "node", task, settings=named).say(ticket)
    return msgspec.convert(coordinator.hear(), Curve)
