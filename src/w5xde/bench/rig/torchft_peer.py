"""A contestant: DiLoCo of torchft, if that is installed. Each node is a replica group of one process.

torchft agrees on who takes part by a server, its lighthouse, on the coordinator's host. So that, too,
goes over the slow links, as it would at home.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from w5xde.bench.contestants.ddp import keep
from w5xde.bench.contestants.learners import training_step
from w5xde.bench.measure.processes import Line
from w5xde.bench.rig.low_talk import OUTER_MOMENTUM, OUTER_RATE, Method
from w5xde.errors import UsageError
from w5xde.learn.job.job import Job

PORT = 29510
# Longer than the steps between two exchanges take, and than an exchange takes.
TIMEOUT = timedelta(seconds=600)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is: its host, the coordinator's, and how many nodes there are."""

    address: str
    centre: str
    nodes: int


def load_torchft() -> Any:
    """The package, or a refusal that says how to install it."""
    # It writes several lines for every exchange. Our own errors do not go to stderr, but over the line.
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchft  # type: ignore[import-not-found, unused-ignore]
            import torchft.coordination  # type: ignore[import-not-found, unused-ignore]
            import torchft.local_sgd  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError(
            "torchft is not installed", code="W5-303", why=str(error), fix="pip install torchft"
        ) from None
    return torchft


def be_lighthouse(line: Line, given: dict[str, Any]) -> None:
    """The server by which the replicas find each other, until this process is killed."""
    server = load_torchft().coordination.LighthouseServer(
        bind=f"[::]:{PORT}", min_replicas=given["nodes"], join_timeout_ms=1000
    )
    line.say(server.address())
    time.sleep(TIMEOUT.total_seconds() * given["nodes"])


def torchft_method(job: Job, model: nn.Module, period: int, place: Place) -> Method:
    """DiLoCo with the whole model as one fragment; the inner optimizer's step exchanges when it is time."""
    torchft = load_torchft()
    store = TCPStore(place.address, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=place.nodes,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=place.address,
        store_port=store.port,
        lighthouse_addr=f"http://{place.centre}:{PORT}",
        replica_id=place.address,
        hostname=place.address,
        # All begin with the same weights.
        init_sync=False,
    )
    inner = job.optimizer(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    diloco = torchft.local_sgd.DiLoCo(
        manager, [model], inner, outer, sync_every=period, pin_memory=False, use_bucketization=True
    )
    diloco.__enter__()
    keep((store, manager, diloco))
    return Method(training_step(job, model, inner), period)
