"""`w5xde deploy k8s`: what can be chosen and what is refused. `objects.py` has the texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from w5xde.deploy.code import code_of_job
from w5xde.deploy.engine import Engine
from w5xde.deploy.files import DeployFile
from w5xde.deploy.flags import add_nodes, add_port, duration_seconds, whole
from w5xde.deploy.kubernetes.chosen import Resources, RunObjects
from w5xde.deploy.kubernetes.containerfile import CONTAINERFILE
from w5xde.deploy.kubernetes.objects import manifest
from w5xde.deploy.request import DeployRequest
from w5xde.errors import UsageError
from w5xde.setting_sources import SETTINGS_FILE

_EXAMPLES = """examples:
  w5xde deploy k8s train.py --image registry.example/w5xde:1 --nodes 8 | kubectl apply -f -
  w5xde deploy k8s train.py --image registry.example/w5xde:1 --nodes 8 --cpus-per-node 4 -- --epochs 5
  w5xde deploy k8s train.py --image registry.example/w5xde:1 --gpus-per-node 1 --storage 100Gi --out manifests
  w5xde deploy k8s /app/train.py --job-in-image --image registry.example/mine:1 --name tuesday"""
# The names of objects become labels, which have at most 63 characters: this leaves room for `w5xde-` and
# `-nodes`.
_RUN_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9]\d{0,8}(Mi|Gi|Ti|Pi|M|G|T|P)")
_CPUS = re.compile(r"[1-9]\d{0,3}|[1-9]\d{1,4}m|0?\.[1-9]\d?|[1-9]\d{0,3}\.\d{1,2}")
_IMAGE = re.compile(r"[a-z0-9]([a-zA-Z0-9._:/-]*[a-zA-Z0-9])?(@sha256:[0-9a-f]{64})?")
_ACCESS_MODES = ["ReadWriteOncePod", "ReadWriteOnce", "ReadWriteMany"]
# A ConfigMap holds at most 1 MiB; this leaves room for its names.
_CONFIG_BYTES_MAX = 1_000_000


def _like(pattern: re.Pattern[str], example: str) -> Callable[[str], str]:
    """Read a word that matches a pattern."""

    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not like {example}")
        return text

    return read


def _add_flags(command: argparse.ArgumentParser) -> None:
    quantity, cpus = _like(_QUANTITY, "20Gi or 500Mi"), _like(_CPUS, "4, 0.5 or 500m")
    command.add_argument(
        "--image",
        required=True,
        type=_like(_IMAGE, "registry.example/w5xde:1"),
        help="the container image with w5xde; --out writes a Containerfile for one",
    )
    command.add_argument(
        "--job-in-image", action="store_true", help="JOB is a path in the image; it is not read here"
    )
    add_nodes(command, 2, "pods that compute")
    command.add_argument("--cpus-per-node", type=cpus, default="1", metavar="N", help="(default: 1)")
    command.add_argument(
        "--memory-per-node", type=quantity, default="2Gi", metavar="SIZE", help="(default: 2Gi)"
    )
    text = "GPUs of each pod that computes, as nvidia.com/gpu (default: 0)"
    command.add_argument("--gpus-per-node", type=whole(0, 64), default=0, metavar="N", help=text)
    text = "CPUs of the coordinator (default: 1)"
    command.add_argument("--coordinator-cpus", type=cpus, default="1", metavar="N", help=text)
    text = "memory of the coordinator (default: 2Gi)"
    command.add_argument("--coordinator-memory", type=quantity, default="2Gi", metavar="SIZE", help=text)
    text = "size of the volume with the run: checkpoints and ledger (default: 20Gi)"
    command.add_argument("--storage", type=quantity, default="20Gi", metavar="SIZE", help=text)
    text = "class of that volume (default: the cluster's)"
    command.add_argument("--storage-class", type=_like(_NAMESPACE, "fast"), metavar="NAME", help=text)
    text = "who may write to it: ReadWriteOncePod (default) needs a CSI driver, ReadWriteOnce does not"
    command.add_argument("--access-mode", choices=_ACCESS_MODES, default=_ACCESS_MODES[0], help=text)
    command.add_argument("--namespace", metavar="NAME", help="(default: that of kubectl's context)")
    add_port(command)
    text = "end both Jobs after so long, like 12h or 7d; the run can go on later (default: no limit)"
    command.add_argument("--deadline", type=duration_seconds, metavar="TIME", help=text)


def _write(request: DeployRequest, given: argparse.Namespace) -> list[DeployFile]:
    _require_names(request.run, given.namespace)
    files = _mounted_files(request)
    objects = RunObjects(
        request=request,
        image=given.image,
        files=files,
        nodes=given.nodes,
        node=Resources(given.cpus_per_node, given.memory_per_node, given.gpus_per_node),
        coordinator=Resources(given.coordinator_cpus, given.coordinator_memory),
        storage=given.storage,
        storage_class=given.storage_class,
        access_mode=given.access_mode,
        namespace=given.namespace,
        port=given.port,
        deadline_seconds=given.deadline,
    )
    return [
        DeployFile(f"{objects.name}.yaml", manifest(objects)),
        DeployFile("Containerfile", CONTAINERFILE, only_with_out=True),
    ]


def _require_names(run: str, namespace: str | None) -> None:
    if not _RUN_NAME.fullmatch(run):
        raise UsageError(
            f"Kubernetes does not allow objects that are called after {run!r}",
            code="W5-631",
            why="there, names are lower-case letters, digits and dashes; for a run at most 50 of them",
            fix=f"--name {re.sub(r'[^a-z0-9]+', '-', run.lower()).strip('-')[:50].rstrip('-') or 'tuesday'}",
        )
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise UsageError(
            f"{namespace!r} is no name for a namespace",
            code="W5-631",
            why="Kubernetes allows lower-case letters, digits and dashes, at most 63",
            fix="kubectl get namespaces  lists them",
        )


def _mounted_files(request: DeployRequest) -> dict[str, str]:
    """The files that pods find in their folder: the job, what it ships, and the settings that lie here."""
    code = code_of_job(request)
    if code is None:
        return {}
    files = {name: data.decode() for name, data in code.files.items()}
    settings = Path(SETTINGS_FILE)
    if settings.is_file():
        files[SETTINGS_FILE] = settings.read_text(encoding="utf-8")
    size = sum(len(text.encode()) for text in files.values())
    if size > _CONFIG_BYTES_MAX:
        raise UsageError(
            f"the job and what it ships have {size:,} bytes",
            code="W5-634",
            why=f"they go into a ConfigMap, which holds {_CONFIG_BYTES_MAX:,}",
            fix="copy them into the image, and name the job as it lies there with --job-in-image",
        )
    return files


KUBERNETES = Engine(
    "manifests for Kubernetes: a Job for the coordinator, a Job for the nodes, and what they need",
    _EXAMPLES,
    _add_flags,
    _write,
)
