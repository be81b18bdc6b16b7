"""`w5xde demo --chaos`: three nodes train on digits while a script kills and freezes processes.

At the end the weights must be those of a plain PyTorch loop, and the ledger must show every batch once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from w5xde.chaos.child import Child
from w5xde.chaos.pool import ChaosPool
from w5xde.chaos.verdict import judge
from w5xde.cli.panels import page_text
from w5xde.cli.view import make_view
from w5xde.config import Settings
from w5xde.demo import EPOCHS, STEP_BATCHES
from w5xde.errors import UsageError
from w5xde.learn.model.device import core_count
from w5xde.page.child import start_page
from w5xde.runs import MANIFEST, free_name

# The coordinator evicts a node after seven silent seconds; the node joins again when it wakes up.
SHORT_SECONDS, LONG_SECONDS = 3.0, 9.0
COORDINATOR = 0
# (step, fault, the coordinator or the number of a node)
SCRIPT: list[tuple[int, str, int]] = [
    (15, "kill", 1),
    (35, "freeze", 2),
    (55, "kill", COORDINATOR),
    (80, "join", 4),
    (95, "kill", 3),
    (110, "freeze long", 1),
    (140, "kill", COORDINATOR),
    (155, "kill", 2),
    (170, "kill", 4),
    (190, "freeze", COORDINATOR),
]


def run_chaos_demo(settings: Settings) -> dict[str, Any]:
    """Train while the script runs, then in one process; compare the weights, and audit the run."""
    # As many as there are cores, if the user leaves it to us.
    nodes = settings.node_count if settings.node_count is not None else core_count()
    if not nodes:
        raise UsageError("--chaos needs at least one node", code="W5-210", fix="leave out --nodes 0")
    settings = msgspec.structs.replace(settings, epochs=EPOCHS, batches_per_step=STEP_BATCHES)
    name = settings.name or free_name(Path(settings.runs), f"chaos-{time.strftime('%Y%m%d-%H%M%S')}")
    view = make_view(settings)
    pool = ChaosPool(Path(settings.runs) / name, settings, view.say)
    pool.tell(f"run {name}: one coordinator, {nodes} nodes; their logs are in {pool.logs}")
    with pool.open():
        for _ in range(nodes):
            pool.add_node()
        if settings.page:
            pool.until((pool.run / MANIFEST).is_file, "the run begins")
            start_page(pool.run, lambda address: pool.tell(page_text(address)))
        for step, what, number in SCRIPT:
            pool.until_step(step)
            _strike(pool, what, number)
        pool.finish()
    pool.tell("the run has ended; the same in one process, with a plain PyTorch loop …")
    verdict = judge(pool.run, settings)
    verdict.require()
    for line in verdict.lines():
        view.say(line, markup=True)
    return {"run": name, **pool.summary(), **verdict.summary()}


def _strike(pool: ChaosPool, what: str, number: int) -> None:
    if what == "join":
        pool.add_node()
        pool.tell(f"one more node is started at step {pool.progress().step}")
        return
    victim = _victim(pool, number)
    pool.until(lambda: victim.is_working or pool.is_over, f"{victim.name} is there to be hurt")
    if what == "kill":
        pool.kill(victim)
    else:
        pool.freeze(victim, LONG_SECONDS if what == "freeze long" else SHORT_SECONDS)


def _victim(pool: ChaosPool, number: int) -> Child:
    return pool.coordinator if number == COORDINATOR else pool.nodes[(number - 1) % len(pool.nodes)]
