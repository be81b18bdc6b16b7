"""What a user chose for a run on Kubernetes, and the names that its objects have. Writes no objects."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from w5xde.deploy.kubernetes.yaml_text import quoted
from w5xde.deploy.request import DeployRequest

# Where pods find their job.
JOB_FOLDER = "/job"
# The key of the Secret, and the name of the file, that holds the ticket.
TICKET = "ticket"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a pod asks for, and gets at most."""

    cpus: str
    memory: str
    gpus: int = 0

    @property
    def text(self) -> str:
        gpus = f'\n  nvidia.com/gpu: "{self.gpus}"' if self.gpus else ""
        amount = f"\n  cpu: {quoted(self.cpus)}\n  memory: {self.memory}{gpus}"
        return f"requests:{amount}\nlimits:{amount}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObjects:
    """What the user chose for the objects of a run."""

    request: DeployRequest
    image: str
    # The job, what it ships, and w5xde.toml, by their names; empty if the image has the job.
    files: dict[str, str]
    nodes: int
    node: Resources
    coordinator: Resources
    storage: str
    storage_class: str | None
    access_mode: str
    namespace: str | None
    port: int
    deadline_seconds: int | None

    @property
    def name(self) -> str:
        """The name of every object that is the only one of its kind."""
        return f"w5xde-{self.request.run}"

    @property
    def job(self) -> str:
        """The job as pods name it."""
        return self.request.job.at(JOB_FOLDER)

    def meta(self, component: str = "") -> str:
        """The metadata of an object; `component` is pool or nodes for what belongs to one of them."""
        namespace = f"\n  namespace: {self.namespace}" if self.namespace is not None else ""
        name = f"{self.name}-{component}" if component else self.name
        labels = textwrap.indent(self.labels(component), "    ")
        return f"metadata:\n  name: {name}{namespace}\n  labels:\n{labels}"

    def labels(self, component: str = "") -> str:
        lines = [f"app.kubernetes.io/name: w5xde\napp.kubernetes.io/instance: {quoted(self.request.run)}"]
        if component:
            lines.append(f"app.kubernetes.io/component: {component}")
        return "\n".join(lines)


def config_key(name: str) -> str:
    """The name of a file in the ConfigMap, which has no folders. Names have no two dots in a row."""
    return name.replace("/", "..")
