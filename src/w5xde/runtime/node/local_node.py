"""The process of a local node: a node that the coordinator's own command started, by its fork server.

Knows nothing of when it is started: the coordinator decides that.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

import msgspec

from w5xde.config import Settings
from w5xde.errors import W5xdeError
from w5xde.learn.job.job import Job
from w5xde.runtime.admission.node_pass import NodePass
from w5xde.runtime.node.body import Node
from w5xde.runtime.node.exit_status import exit_status
from w5xde.runtime.node.fork_server import Request
from w5xde.runtime.system.parent import call_when_orphaned
from w5xde.runtime.system.shared_memory import NodeRegions
from w5xde.ticket import parse

# How long a new node looks for a coordinator that is just about to listen.
START_SECONDS = 10.0
# How soon a node notices that its fork server has died, and how long it may take to end then: one that
# computes on its event loop cannot end by itself.
ORPHAN_SECONDS = 1.0
ORPHAN_END_SECONDS = 5.0


def run_local_node(job: Job, settings: Settings, request: Request) -> None:
    """The main function of a local node's process; its exit status says what went wrong."""
    server = os.getppid()
    _yield_to_coordinator()
    own = msgspec.structs.replace(
        settings, node_name=request.name, devices=request.device, wait=START_SECONDS
    )
    share = None
    # Without it the node sends and receives everything by its socket.
    with contextlib.suppress(OSError):
        share = NodeRegions(request.descriptors) if request.descriptors else None
    node = Node(job, NodePass(parse(request.ticket), keeps=False), own, share=share)
    try:
        asyncio.run(until_orphaned(node, server))
    except W5xdeError as error:
        if settings.log != "silent" and os.getppid() == server:
            print(f"{request.name}: {error.lines()[0]}", file=sys.stderr, flush=True)
        os._exit(exit_status(error))


def _end_late() -> None:
    time.sleep(ORPHAN_END_SECONDS)
    os._exit(1)


def _yield_to_coordinator() -> None:
    """Keep a node that wakes up from preempting the coordinator, for which all other nodes wait.

    Measured on two cores: otherwise a third of the coordinator's time passes inside `send`.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


async def until_orphaned(node: Node, server: int) -> None:
    """Run a node until it ends or its fork server does: the next fork server starts nodes of its own."""
    call_when_orphaned(server, _end_late)
    running = asyncio.ensure_future(node.run())
    while not running.done():
        await asyncio.wait([running], timeout=ORPHAN_SECONDS)
        if os.getppid() != server:
            running.cancel()
            return
    running.result()
