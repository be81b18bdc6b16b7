"""How many nodes this machine runs, and whether it has enough open files and memory for them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from w5xde.control.pool.machine_share import Room, devices_of_nodes
from w5xde.errors import UsageError
from w5xde.learn.model.device import core_count
from w5xde.runtime.system.memory import available_bytes, grown_bytes

# The connection of a large model's node has a second handle of its socket.
DESCRIPTORS_PER_NODE = 2
# For everything but nodes: ledger, checkpoints, the listener, the loader.
DESCRIPTORS_SPARE = 100
# The limit is raised to this if the system allows it, for nodes that join later; macOS accepts no more.
DESCRIPTORS_USUAL = 10_240
# Memory that a local node shares with no other process: 11 MiB were measured with a model of 300 parameters.
NODE_BYTES_MIN = 10 * 2**20


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The nodes that a command may start on this machine: the device of each, the most there may be."""

    devices: list[str]
    # The user left their number to us: fewer are started if memory has no room for all.
    is_auto: bool = False

    def fitting(self, state_bytes: int, first_pid: int | None) -> int | None:
        """How many of the nodes have room in memory; None if that is known only once a node has computed.

        `state_bytes` are those of the model, `first_pid` is the process of a node that has computed a batch.
        """
        wanted, room = len(self.devices), Room(state_bytes, available_bytes())
        if not self.is_auto or room.is_ample(wanted):
            return wanted
        if first_pid is None:
            return None
        return room.nodes(wanted, max(NODE_BYTES_MIN, grown_bytes(first_pid)))


def plan_nodes(devices: list[str], threads: int, count: int | None) -> NodePlan:
    """The nodes that use this machine, each with this many threads; with a `count`, that many."""
    return NodePlan(devices_of_nodes(devices, core_count(), threads, count), is_auto=count is None)


def little_memory_text(fitting: int, plan: NodePlan) -> str:
    """Why fewer nodes are started than there are cores."""
    nodes = "1 node" if fitting == 1 else f"{fitting} nodes"
    return (
        f"memory has room for {nodes} here, and there are cores for {len(plan.devices)};"
        " --nodes N starts N all the same"
    )


def require_capacity(nodes: int) -> None:
    """Refuse more local nodes than open files and memory suffice for."""
    require_descriptors(nodes)
    require_memory(nodes)


def require_descriptors(nodes: int) -> None:
    """Raise the limit of open files as far as `nodes` need it; UsageError if the system refuses."""
    try:
        import resource
    except ImportError:
        return  # Windows has no such limit
    wanted = nodes * DESCRIPTORS_PER_NODE + DESCRIPTORS_SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = max(wanted, DESCRIPTORS_USUAL)
    if resource.RLIM_INFINITY != soft < target:
        allowed = target if hard == resource.RLIM_INFINITY else min(target, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
        if soft < wanted:
            raise UsageError(
                f"{nodes:,} nodes need {wanted:,} open files, and only {soft:,} are allowed here",
                code="W5-241",
                fix=f"ulimit -n {wanted}, or fewer --nodes",
            )


def require_memory(nodes: int) -> None:
    """UsageError if even nodes with the smallest model would not fit into the memory that is left."""
    available = available_bytes()
    if nodes * NODE_BYTES_MIN > available:
        raise UsageError(
            f"{nodes:,} local nodes need at least {nodes * NODE_BYTES_MIN / 2**30:.1f} GiB of memory, and"
            f" {available / 2**30:.1f} GiB are left",
            code="W5-304",
            fix=f"start at most {available // NODE_BYTES_MIN:,} with --nodes, and others on other machines",
        )
