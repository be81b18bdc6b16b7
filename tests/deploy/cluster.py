"""A small Kubernetes for Jobs: it starts pods from the objects of a file, and applies their rules.

What is as there: volumes (a claim that outlives pods, a Secret and a ConfigMap as links to read-only files,
a scratch folder), variables for Services unless they are refused, `restartPolicy: Never`, `podFailurePolicy`
in the order of its rules, `backoffLimit`, `podReplacementPolicy: Failed`, completions and work queues,
evictions (DisruptionTarget, SIGTERM, SIGKILL after the grace), deadlines, numbers of cores. What is not:
scheduling, waiting between restarts, limits of memory, users, network policies. `contained.py` says how a
command is started.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.contained import Container, Mounts, Start, lines_of, wait_while

Document = Mapping[str, Any]
# Exit code of a process that a signal killed, as containers report it.
KILLED = 128


@dataclass
class Pod:
    """One pod, with its one container."""

    name: str
    container: Container
    grace_seconds: float
    is_disrupted: bool = False
    asked_at: float | None = None
    status: int | None = None

    def evict(self) -> None:
        """As a drain or a preemption does: condition, SIGTERM, and after the grace SIGKILL."""
        self.is_disrupted = True
        self.end()

    def end(self) -> None:
        self.asked_at = time.monotonic()
        self.container.ask_to_end()

    def look(self) -> None:
        """Note the end of the container; kill it when its grace is over."""
        if self.status is not None:
            return
        code = self.container.process.poll()
        if code is not None:
            self.status = code if code >= 0 else KILLED - code
            if code >= 0:
                # An orderly end leaves no process behind; what a kill leaves, the runtime kills.
                self.container.wait_for_members()
            self.container.kill_members()
        elif self.asked_at is not None and time.monotonic() - self.asked_at > self.grace_seconds:
            self.container.process.send_signal(signal.SIGKILL)


@dataclass
class JobController:
    """One Job: which pods it has, and whether it is complete or has failed."""

    name: str
    spec: Document
    start_pod: Callable[[str], Pod]
    pods: list[Pod] = field(default_factory=list)
    # Each end that was judged: the pod, and what the rules said.
    verdicts: dict[str, str] = field(default_factory=dict)
    condition: str | None = None

    @property
    def active(self) -> list[Pod]:
        """Pods that have not ended, also those that are ending: podReplacementPolicy is Failed."""
        return [pod for pod in self.pods if pod.status is None]

    def count(self, verdict: str) -> int:
        return list(self.verdicts.values()).count(verdict)

    def reconcile(self) -> None:
        """Judge pods that have ended, and start those that are missing."""
        for pod in self.pods:
            pod.look()
            if pod.status is not None and pod.name not in self.verdicts:
                self.verdicts[pod.name] = self._judge(pod)
                if self.verdicts[pod.name] == "FailJob":
                    self.fail("PodFailurePolicy")
        if self.count("Count") > self.spec["backoffLimit"]:
            self.fail("BackoffLimitExceeded")
        if self.condition is not None:
            return
        if self.count("Succeeded") and not self.active:
            self.condition = "Complete"
        elif not self.count("Succeeded"):
            for _ in range(self.spec["parallelism"] - len(self.active)):
                self.pods.append(self.start_pod(f"{self.name}-{len(self.pods)}"))

    def fail(self, reason: str) -> None:
        """End the Job, and all its pods."""
        if self.condition is None:
            self.condition = f"Failed: {reason}"
            for pod in self.active:
                pod.end()

    def _judge(self, pod: Pod) -> str:
        if pod.status == 0:
            return "Succeeded"
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if "onExitCodes" in rule:
                assert rule["onExitCodes"]["operator"] == "In"
                if pod.status in rule["onExitCodes"]["values"]:
                    return str(rule["action"])
            elif pod.is_disrupted and rule["onPodConditions"] == [
                {"type": "DisruptionTarget", "status": "True"}
            ]:
                return str(rule["action"])
        return "Count"


class Cluster:
    """The objects of one file, and what runs by them."""

    def __init__(
        self, folder: Path, objects: Mapping[tuple[str, str], Document], secrets: Mapping[str, Path]
    ) -> None:
        """`secrets`: for each Secret the folder from which `kubectl create secret` makes it."""
        self._folder, self._objects, self._secrets = folder, objects, secrets
        self._numbers = itertools.count()
        # Claims by their names; they outlive pods and Jobs.
        self._claims: dict[str, Path] = {}
        self.jobs: dict[str, JobController] = {}
        self._ended: list[Pod] = []

    def __enter__(self) -> Cluster:
        self.apply()
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods:
            pod.container.close()

    @property
    def pods(self) -> list[Pod]:
        """All pods that there ever were."""
        return [*self._ended, *(pod for job in self.jobs.values() for pod in job.pods)]

    def apply(self) -> None:
        """Make the Jobs that do not exist."""
        for (kind, name), found in self._objects.items():
            if kind == "Job" and name not in self.jobs:
                self.jobs[name] = JobController(name, found["spec"], self._starter(name))

    def delete_jobs(self) -> None:
        """End the pods of all Jobs, and forget the Jobs."""
        for job in self.jobs.values():
            job.fail("deleted")
        self.wait_until(lambda: not any(job.active for job in self.jobs.values()), "the pods end")
        self._ended += [pod for job in self.jobs.values() for pod in job.pods]
        self.jobs.clear()

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Let the Jobs work until the condition holds."""
        wait_while(self._reconcile, is_so, lambda: self.told(f"not so: {what}"))

    def _reconcile(self) -> None:
        for job in self.jobs.values():
            job.reconcile()

    def told(self, what: str) -> str:
        """What happened, for the message of a test that failed."""
        jobs = "\n".join(f"{job.name}: {job.condition} {job.verdicts}" for job in self.jobs.values())
        return "\n".join([what, jobs, *lines_of([pod.container for pod in self.pods])])

    def claim(self, name: str) -> Path:
        """The folder of a volume."""
        assert ("PersistentVolumeClaim", name) in self._objects
        if name not in self._claims:
            self._claims[name] = self._folder / "claims" / name
            self._claims[name].mkdir(parents=True)
        return self._claims[name]

    # --- pods -------------------------------------------------------------------------------------

    def _starter(self, job: str) -> Callable[[str], Pod]:
        def start(name: str) -> Pod:
            template = self._objects["Job", job]["spec"]["template"]
            return self._start_pod(f"{next(self._numbers):02}-{name}", template["spec"])

        return start

    def _start_pod(self, name: str, spec: Document) -> Pod:
        assert spec["restartPolicy"] == "Never"
        [container] = spec["containers"]
        folder = self._folder / "pods" / name
        volumes = {each["name"]: self._volume(each, folder / each["name"]) for each in spec["volumes"]}
        mounts = container["volumeMounts"]
        found = Mounts(
            {each["mountPath"]: volumes[each["name"]] for each in mounts},
            [each["mountPath"] for each in mounts if not each.get("readOnly")],
            next(volumes[each["name"]] for each in mounts if each["mountPath"] == "/tmp"),
        )
        assert container["securityContext"]["readOnlyRootFilesystem"]
        variables = {"HOSTNAME": name, "KUBERNETES_SERVICE_HOST": "10.0.0.1", **self._links(spec)}
        variables |= {each["name"]: each["value"] for each in container["env"]}
        words = [word.replace("$$(", "$(") for word in container["command"]]
        services = [name for kind, name in self._objects if kind == "Service"]
        cores = int(container["resources"]["limits"]["cpu"])
        start = Start(words, variables, found, container.get("workingDir", "/"), services, cores)
        started = Container.start(start, folder / "log")
        return Pod(name, started, spec["terminationGracePeriodSeconds"])

    def _links(self, spec: Document) -> dict[str, str]:
        """The variables that each Service becomes in every pod that does not refuse them."""
        if not spec.get("enableServiceLinks", True):
            return {}
        names = [name for kind, name in self._objects if kind == "Service"]
        links = {name.upper().replace("-", "_"): name for name in names}
        return {f"{word}_SERVICE_HOST": "10.0.0.2" for word in links}

    def _volume(self, volume: Document, folder: Path) -> Path:
        if "persistentVolumeClaim" in volume:
            folder.parent.mkdir(parents=True, exist_ok=True)
            return self.claim(volume["persistentVolumeClaim"]["claimName"])
        folder.mkdir(parents=True)
        if "secret" in volume:
            source = self._secrets[volume["secret"]["secretName"]]
            contents = {each.name: each.read_text() for each in source.iterdir() if each.is_file()}
            # The group of the pod may read what its owner may.
            _mount(contents, volume["secret"].get("items"), folder, volume["secret"]["defaultMode"] | 0o040)
        elif "configMap" in volume:
            contents = self._objects["ConfigMap", volume["configMap"]["name"]]["data"]
            _mount(contents, volume["configMap"].get("items"), folder, 0o644)
        else:
            assert volume == {"name": volume["name"], "emptyDir": {}}
            # Kubernetes makes it for everybody; the group of the pod owns it.
            folder.chmod(0o777)
        return folder


def _mount(contents: Mapping[str, str], items: list[Document] | None, folder: Path, mode: int) -> None:
    """Files as Kubernetes mounts them: links into a folder of which there is a new one for each change."""
    chosen = items or [{"key": key, "path": key} for key in contents]
    inner = folder / "..2026_11_18"
    for item in chosen:
        file = inner / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(contents[item["key"]])
        file.chmod(mode)
    (folder / "..data").symlink_to(inner.name)
    for top in {item["path"].split("/")[0] for item in chosen}:
        (folder / top).symlink_to(Path("..data") / top)
