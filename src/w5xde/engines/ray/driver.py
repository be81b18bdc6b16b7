"""The driver: places the actors of a run on a Ray cluster, shows the run, and ends it.

A driver that dies does not end a run with `--resume auto`: the same command finds it again. Progress comes as
the lines that the coordinator's own command prints; the result is in the run's folder, which all hosts see.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from w5xde.engines.minded import Ended
from w5xde.engines.ray.actors import CALLS_AT_A_TIME, CoordinatorActor, NodeActor, RunPlan, end_actors
from w5xde.engines.ray.cluster import Needs, connected, require_hosts, settle_range
from w5xde.engines.ray.feed import News
from w5xde.engines.ray.lookout import NAMESPACE, Lookout, Trouble
from w5xde.engines.told import error_of
from w5xde.errors import NOT_OVER, ClusterError, StorageError, W5xdeError
from w5xde.specs.engine_settings import NodeRange

# How late an interrupt may be noticed.
WAKE_SECONDS = 0.2
# How long nodes may look for a place before the user is told that some have none.
PLACE_SECONDS = 10.0
# How long a coordinator whose cluster is in trouble may take to say how it ended.
LAST_WORDS_SECONDS = 20.0
# Actors are started again for ever: the run's own checks decide when it makes no sense.
_FOR_EVER = {"max_restarts": -1, "max_task_retries": -1, "namespace": NAMESPACE}


@dataclass(frozen=True)
class RayTask:
    """What a driver has to do."""

    plan: RunPlan
    run: Path
    job_file: str
    wanted: NodeRange | None
    needs: Needs
    # Whether the run outlives its driver, to be found again by the same command.
    goes_on: bool
    advertises: bool
    say: Callable[[str], None] = field(compare=False)


def run_on_ray(task: RayTask) -> int:
    """Run a task to the end of its run, whose result is in its folder then; returns the exit code.

    Raises the error of a command that failed; KeyboardInterrupt if the user interrupts it twice.
    """
    with connected(), _Interrupts() as interrupts:
        nodes = settle_range(task.wanted, task.needs)
        require_hosts(task.run.parent, task.plan.folder, task.job_file)
        driver = _Driver(task, nodes, interrupts)
        try:
            driver.place()
            return driver.attend()
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise _lost(str(error).splitlines()[0]) from error
        finally:
            driver.end()


class _Interrupts:
    """Counts Ctrl-C and SIGTERM, instead of ending this process, for as long as the block runs."""

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _count(self, number: int, frame: object) -> None:
        self.count += 1
        if self.count == 1:
            print("finishing what is begun; once more stops now", file=sys.stderr, flush=True)


class _Driver:
    """Attends one run."""

    def __init__(self, task: RayTask, nodes: NodeRange, interrupts: _Interrupts) -> None:
        self._task = task
        self._nodes = nodes
        self._interrupts = interrupts
        self._crew: list[Any] = []
        self._failed: dict[int, Ended] = {}
        # The hosts of nodes that have found a place, whichever life of the coordinator's actor heard of it.
        self._hosts: dict[int, str] = {}
        self._told_places = ""
        self._attends = self._goes_on = self._has_asked = False
        self._lookout: Lookout | None = None
        self._trouble: Trouble | None = None

    # --- placing ------------------------------------------------------------------------------

    def place(self) -> None:
        """Place the actors, or find those of a run that goes on."""
        plan, lifetime = self._task.plan, "detached" if self._task.goes_on else None
        self._refuse_or_remove()
        self._attends = True
        if not self._goes_on:
            # Nodes would dial what an earlier run of this name has left there.
            Path(plan.ticket).unlink(missing_ok=True)
        coordinator = ray.remote(CoordinatorActor).options(
            name=plan.coordinator,
            # None: it must have room wherever it is started again, also if nodes wait for all that is free.
            num_cpus=0,
            max_concurrency=CALLS_AT_A_TIME,
            get_if_exists=True,
            lifetime=lifetime,
            **_FOR_EVER,
        )
        self._coordinator = coordinator.remote(plan, self._task.advertises)
        node = ray.remote(NodeActor)
        self._crew = [
            node.options(
                name=plan.node(number),
                get_if_exists=True,
                lifetime=lifetime,
                **self._task.needs.options(),
                **_FOR_EVER,
            ).remote(plan, number)
            for number in range(self._nodes.most)
        ]
        self._began_at = time.monotonic()
        self._lookout = Lookout(plan.coordinator, self._alarm)

    def _alarm(self, trouble: Trouble) -> None:
        # That this host is about to be taken away is no trouble for the run.
        self._trouble = trouble if trouble is not Trouble.DRAINED else None
        self._trouble_at = time.monotonic()

    def _refuse_or_remove(self) -> None:
        """Refuse a run that another driver attends; remove the actors of one that has ended."""
        plan = self._task.plan
        found = _find(plan.coordinator)
        if found is None:
            return
        news: News = ray.get(found.watch.remote("", 0))
        if news.ended is None and self._task.goes_on:
            self._task.say(f"run {self._task.run.name} goes on, on this cluster: this command shows it")
            self._goes_on = True
            return
        if news.ended is None:
            raise StorageError(
                f"run {self._task.run.name} is in use, on this cluster",
                code="W5-406",
                fix=f"show it with  --name {self._task.run.name} --resume auto , or stop its command first",
            )
        end_actors(plan)
        while _find(plan.coordinator) is not None:
            time.sleep(WAKE_SECONDS)

    # --- showing ------------------------------------------------------------------------------

    def attend(self) -> int:
        """Show the run until it has ended; raise its error if it failed, else return its exit code."""
        life, seen = "", 0
        while True:
            if (self._interrupts.count or self._all_failed) and not self._has_asked:
                self._coordinator.leave.remote()
                self._has_asked = True
            news = self._ask(life, seen)
            if news is None:
                continue
            for line in news.lines:
                self._task.say(line)
            life, seen = news.life, news.seen
            if news.ended is not None:
                return self._judged(news.ended, news.trouble)
            self._tell_places(news)

    def _ask(self, life: str, seen: int) -> News | None:
        """The news of the run; None if the user wants to be heard first."""
        answer = self._coordinator.watch.remote(life, seen)
        news: News | None = None
        while news is None:
            if self._interrupts.count >= 2:
                raise KeyboardInterrupt
            if self._interrupts.count and not self._has_asked:
                return None
            self._require_cluster()
            if ray.wait([answer], timeout=WAKE_SECONDS)[0]:
                news = ray.get(answer)
        return news

    def _require_cluster(self) -> None:
        """Give up a run whose cluster is in trouble, once its coordinator had time to end it in order."""
        if self._trouble is not None and time.monotonic() - self._trouble_at > LAST_WORDS_SECONDS:
            raise _lost(self._trouble.value)

    def _tell_places(self, news: News) -> None:
        """Tell how many nodes have found a place, when that changes."""
        self._hosts |= news.hosts
        placed, most = len(self._hosts), self._nodes.most
        late = time.monotonic() - self._began_at > PLACE_SECONDS
        text = ""
        if placed == most:
            hosts = len(set(self._hosts.values()))
            text = f"every node has a place: {most} on {hosts} {'host' if hosts == 1 else 'hosts'}"
        elif late:
            wait = (
                "wait for a host" if placed >= self._nodes.least else "still wait for a host, which they need"
            )
            text = f"{placed} of {most} nodes have a place; the others {wait} ({self._task.needs})"
        if text and text != self._told_places:
            self._told_places = text
            self._task.say(text)
        for number, ended in news.failed.items():
            if number not in self._failed:
                self._failed[number] = ended
                host = self._hosts.get(number, "a host")
                for line in error_of(ended, f"node {number}").lines():
                    self._task.say(f"node {number} on {host}: {line.strip()}")

    @property
    def _all_failed(self) -> bool:
        return len(self._failed) == self._nodes.most

    def _judged(self, ended: Ended, trouble: str) -> int:
        """The exit code of a run that has ended in order; raises the error of one that has not."""
        if trouble:
            raise _lost(trouble)
        if ended.status == NOT_OVER and self._all_failed:
            raise error_of(next(iter(self._failed.values())), "every node")
        if ended.status not in (0, NOT_OVER):
            raise error_of(ended, "the coordinator")
        return ended.status

    # --- ending -------------------------------------------------------------------------------

    def end(self) -> None:
        """End the actors of this run."""
        if self._lookout is not None:
            self._lookout.stop()
        if not self._attends or self._trouble is not None:
            return
        with contextlib.suppress(Exception):
            end_actors(self._task.plan)


def _find(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _lost(why: str) -> W5xdeError:
    return ClusterError(
        "the cluster no longer minds this run",
        code="W5-606",
        why=why,
        fix="start the cluster again, and give the same command with --name and --resume auto: it goes on",
    )


def key_of(runs: Path, run: str) -> str:
    """Names a run among all on a cluster."""
    return f"{run}:{hashlib.sha256(str(runs).encode()).hexdigest()[:8]}"
