"""The actors of a run on Ray: one minds the coordinator's command, the others mind the nodes' commands.

Ray starts a dead actor again, perhaps on another host, by calling its constructor alone: so work begins
there. The actors know the words of their commands, and nothing of the run.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ray

from w5xde.engines.minded import Ended, MindedCommand
from w5xde.engines.ray.cluster import folder_here
from w5xde.engines.ray.feed import Feed, News
from w5xde.engines.ray.lookout import NAMESPACE, Lookout, Trouble
from w5xde.engines.restarts import Next, Restarts
from w5xde.errors import NOT_OVER
from w5xde.runs import STATE_VARIABLE

# How long a driver may wait in one call for something new.
WATCH_SECONDS = 1.0
# Drivers that ask at the same time, and nodes that tell something.
CALLS_AT_A_TIME = 32
# Long after the start, which has better things to do, and long before a ticket ends.
RENEW_SECONDS = 20.0
# A run that ended keeps its actors so long, for a driver that comes to ask how it ended.
LINGER_SECONDS = 60.0
# The same if the cluster is in trouble: a driver that is there has asked by then.
LAST_WORDS_SECONDS = 3.0


@dataclass(frozen=True)
class RunPlan:
    """What the actors of one run are told: names, folders and the words of their commands."""

    # Names this run among all on the cluster: two folders may have runs of one name.
    key: str
    # The folder in which the command was given: the same on every host.
    folder: str
    serve: list[str]
    join: list[str]
    # A ticket for as long as the run lasts, in place of the one of its first day; and the file that has it.
    renew: list[str]
    ticket: str
    variables: dict[str, str]

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's actor."""
        return f"coordinator:{self.key}"

    def node(self, number: int) -> str:
        """The name of a node's actor."""
        return f"node:{number}:{self.key}"


class CoordinatorActor:
    """Minds `w5xde serve`: a restart, here or elsewhere, goes on with the run."""

    def __init__(self, plan: RunPlan, advertises: bool) -> None:
        self._plan = plan
        self._feed = Feed()
        self._trouble: Trouble | None = None
        where = [] if advertises else ["--advertise", ray.util.get_node_ip_address()]
        self._command = MindedCommand(
            [*plan.serve, *where], folder_here(plan.folder), plan.variables, self._hear, time.monotonic
        )
        Lookout(plan.coordinator, self._alarm)
        for work in (self._mind, self._renew_ticket):
            threading.Thread(target=work, daemon=True).start()

    # --- what drivers and nodes call ----------------------------------------------------------

    def watch(self, life: str, seen: int) -> News:
        """What is new since a driver has seen so many lines of this life."""
        return self._feed.news(life, seen, WATCH_SECONDS)

    def leave(self) -> None:
        """End the run in order."""
        self._command.leave()

    def placed(self, node: int, host: str) -> None:
        """A node has found a place."""
        self._feed.placed(node, host)

    def gave_up(self, node: int, ended: Ended) -> None:
        """A node has ended with a mistake that it would make again."""
        self._feed.failed(node, ended)

    # --- threads of its own -------------------------------------------------------------------

    def _hear(self, line: str) -> None:
        print(line, flush=True)
        self._feed.say(line)

    def _alarm(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._hear(f"the coordinator on {platform.node()} leaves: {trouble.value}")
        self._command.leave()

    def _renew_ticket(self) -> None:
        """Replace each ticket that the coordinator writes when it starts, which lasts a day."""
        file, renewed = Path(self._plan.ticket), _text_of(self._plan.ticket)
        while not self._command.is_leaving:
            time.sleep(RENEW_SECONDS)
            if _text_of(file) != renewed:
                plan = self._plan
                MindedCommand(plan.renew, folder_here(plan.folder), {}, print, time.monotonic).run()
                renewed = _text_of(file)

    def _mind(self) -> None:
        restarts = Restarts()
        while True:
            ended = self._command.run()
            decision = restarts.after(ended)
            if self._trouble is not None and decision.next is Next.AGAIN:
                self._give_way(self._trouble)
            if decision.next is not Next.AGAIN or self._command.is_leaving:
                break
            self._hear(f"the coordinator's command ended ({_status_text(ended.status)}): it starts again")
            self._command.pause(decision.pause_seconds)
        self._feed.end(Ended(NOT_OVER, ended.lines) if decision.next is Next.AGAIN else ended)
        # A driver that is there has ended us by then.
        time.sleep(LINGER_SECONDS)
        self._end_all()

    def _give_way(self, trouble: Trouble) -> None:
        """End this process: Ray starts the actor again elsewhere, if it knows of it."""
        if trouble is not Trouble.DRAINED:
            self._feed.end(Ended(NOT_OVER), trouble.value)
            time.sleep(LAST_WORDS_SECONDS)
        os._exit(1)

    def _end_all(self) -> None:
        """End all actors of this run: no driver is there to do it."""
        end_actors(self._plan)


class NodeActor:
    """Minds `w5xde join`: it waits for the coordinator, finds it again when it moves, and leaves politely."""

    def __init__(self, plan: RunPlan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._trouble: Trouble | None = None
        # Of this start alone: a node on another host gets another credential.
        self._own = tempfile.mkdtemp(prefix="w5xde-node-")
        self._command = MindedCommand(
            plan.join,
            folder_here(plan.folder),
            {**plan.variables, STATE_VARIABLE: self._own},
            self._hear,
            time.monotonic,
        )
        Lookout(plan.node(number), self._alarm)
        threading.Thread(target=self._mind, daemon=True).start()

    def host(self) -> str:
        return platform.node()

    def _hear(self, line: str) -> None:
        # Ray keeps it in the log of this actor.
        print(line, flush=True)

    def _alarm(self, trouble: Trouble) -> None:
        self._trouble = trouble
        self._hear(f"this node leaves: {trouble.value}")
        self._command.leave()

    def _mind(self) -> None:
        restarts = Restarts()
        self._tell("placed", platform.node())
        while True:
            ended = self._command.run()
            decision = restarts.after(ended)
            if self._trouble is not None and decision.next is Next.AGAIN:
                shutil.rmtree(self._own, ignore_errors=True)
                os._exit(1)
            if decision.next is not Next.AGAIN:
                break
            self._command.pause(decision.pause_seconds)
        if decision.next is Next.FAILED:
            self._tell("gave_up", ended)
        shutil.rmtree(self._own, ignore_errors=True)
        # So that its place is free; the head is asked, because only it can end an actor for good.
        ray.kill(ray.get_runtime_context().current_actor)

    def _tell(self, what: str, fact: object) -> None:
        """Tell the coordinator's actor something, if there is one."""
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            coordinator = ray.get_actor(self._plan.coordinator, namespace=NAMESPACE)
            told = coordinator.placed if what == "placed" else coordinator.gave_up
            ray.get(told.remote(self._number, fact), timeout=LINGER_SECONDS)


def _text_of(file: str | Path) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def _status_text(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"code {status}"


def end_actors(plan: RunPlan) -> None:
    """End all actors of a run that are there, the coordinator's last."""
    known = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in known if each["namespace"] == NAMESPACE]
    for name in sorted((name for name in names if name.endswith(f":{plan.key}")), reverse=True):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
