"""The objects of a run on Kubernetes but its Jobs, as YAML with a comment for each choice."""

from __future__ import annotations

import shlex
import textwrap

from w5xde.deploy.kubernetes.chosen import TICKET, RunObjects, config_key
from w5xde.deploy.kubernetes.jobs import nodes_job, pool_job
from w5xde.deploy.kubernetes.yaml_text import block, quoted

# How long a ticket admits pods that replace others: longer than most runs.
LIFETIME = "30d"


def manifest(objects: RunObjects) -> str:
    """All objects but the Secret, which no file should hold."""
    parts = [_claim(objects), _service(objects), _policies(objects), pool_job(objects), nodes_job(objects)]
    if objects.files:
        parts.insert(0, _config(objects))
    return _heading(objects) + "".join(f"---\n{part.strip()}\n" for part in parts)


def ticket_command(objects: RunObjects) -> list[str]:
    """The command that makes the coordinator's identity and the nodes' ticket, before there is a run."""
    # In the namespace of the pods the Service has this short name.
    where = ["--advertise", objects.name, "--port", str(objects.port)]
    limits = ["--lifetime", LIFETIME, "--uses", "any"]
    folder = objects.name
    made = ["--identity", folder, *where, *limits, "--out", f"{folder}/{TICKET}"]
    return ["w5xde", "ticket", "new", "--offline", *made]


def _heading(objects: RunObjects) -> str:
    name, space = objects.name, f" -n {objects.namespace}" if objects.namespace else ""
    return f"""\
# Run {objects.request.run} of {objects.request.job.reference}, for Kubernetes 1.29 or newer.
# Written by  w5xde deploy k8s
#
# These objects need a Secret with the coordinator's identity and a ticket for the nodes. It is not in this
# file, so that you can keep the file anywhere. Once, before the first  kubectl apply:
#   {shlex.join(ticket_command(objects))}
#   kubectl{space} create secret generic {name} --from-file={name}
# See how it goes:
#   kubectl{space} logs -f job/{name}-pool
# More or fewer nodes:
#   kubectl{space} patch job {name}-nodes --type merge -p '{{"spec": {{"parallelism": 16}}}}'
# Stop the run; apply this file again, and it goes on:
#   kubectl{space} delete job {name}-pool {name}-nodes
# Remove everything, also the volume and with it the run:
#   kubectl{space} delete -f FILE
"""


def _config(objects: RunObjects) -> str:
    files = "\n".join(
        f"  {quoted(config_key(name))}: {block(text, 4)}" for name, text in objects.files.items()
    )
    return f"""
# The job, and what it ships. A change needs new Jobs: delete them, and apply again.
apiVersion: v1
kind: ConfigMap
{objects.meta()}
data:
{files}
"""


def _claim(objects: RunObjects) -> str:
    chosen = f"\n  storageClassName: {objects.storage_class}" if objects.storage_class is not None else ""
    return f"""
# The run: checkpoints, ledger and weights. A coordinator that starts again, on any machine, goes on from
# here. ReadWriteOncePod: never two coordinators at once, not even when a machine is cut off and its pod is
# replaced.
apiVersion: v1
kind: PersistentVolumeClaim
{objects.meta()}
spec:
  accessModes:
    - {objects.access_mode}{chosen}
  resources:
    requests:
      storage: {objects.storage}
"""


def _service(objects: RunObjects) -> str:
    return f"""
# The one address of the coordinator, wherever its pod runs. There is no probe: it would be one more
# connection without a ticket, and nodes try again by themselves until the coordinator listens.
apiVersion: v1
kind: Service
{objects.meta()}
spec:
  selector:
{textwrap.indent(objects.labels("pool"), "    ")}
  ports:
    - name: w5xde
      protocol: TCP
      port: {objects.port}
      targetPort: {objects.port}
"""


def _policies(objects: RunObjects) -> str:
    return f"""
# Only this run's nodes reach the coordinator, and nothing reaches the nodes. What they reach is not limited:
# a job may read its data from anywhere. (The cluster's network plugin must know policies.)
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
{objects.meta("pool")}
spec:
  podSelector:
    matchLabels:
{textwrap.indent(objects.labels("pool"), "      ")}
  policyTypes:
    - Ingress
  ingress:
    - from:
        - podSelector:
            matchLabels:
{textwrap.indent(objects.labels("nodes"), "              ")}
      ports:
        - protocol: TCP
          port: {objects.port}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
{objects.meta("nodes")}
spec:
  podSelector:
    matchLabels:
{textwrap.indent(objects.labels("nodes"), "      ")}
  policyTypes:
    - Ingress
"""
