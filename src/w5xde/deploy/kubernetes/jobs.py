"""The two Jobs of a run on Kubernetes, with a comment for each choice.

A StatefulSet would start a coordinator again that has finished, and a Deployment nodes. Jobs end. The nodes
are a Job of their own, because the two end, fail and grow apart from each other.
"""

from __future__ import annotations

import textwrap

from w5xde.deploy.kubernetes.chosen import JOB_FOLDER, TICKET, Resources, RunObjects, config_key
from w5xde.deploy.kubernetes.yaml_text import listed, quoted

# Where pods find their other volumes.
RUNS_FOLDER, IDENTITY_FOLDER, TICKET_FOLDER, SCRATCH_FOLDER = "/runs", "/identity", "/ticket", "/tmp"
# Any user but root; that of the Containerfile.
USER_ID = 10001
# A coordinator ends in order within 20 s of SIGTERM, a node sooner; this leaves room for a slow disk.
GRACE_SECONDS = 60
# Crashes after which the coordinator's Job fails: Kubernetes waits up to 6 minutes between two, so this is
# about ten hours. Evictions and orderly ends count for none.
POOL_CRASHES_MAX = 100
# The same for nodes: so many for each, and a hundred at least.
NODE_CRASHES_MAX = 10
# How long a node looks for a coordinator that it has never seen. Then its pod is replaced by another one,
# which looks again; a pod that starts when the run is over is gone after this time.
WAIT = "5m"


def pool_job(objects: RunObjects) -> str:
    identity = ["--identity", IDENTITY_FOLDER, "--ticket", f"@{IDENTITY_FOLDER}/{TICKET}"]
    place = ["--host", "0.0.0.0", "--port", str(objects.port), "--advertise", objects.name]
    words = objects.request.serve_words(objects.job, RUNS_FOLDER, *place, *identity)
    volumes = f"""\
- name: runs
  persistentVolumeClaim:
    claimName: {objects.name}
- name: identity
  secret:
    secretName: {objects.name}
    # For their owner; the fsGroup of the pod makes it 0440.
    defaultMode: 0400
"""
    mounts = f"""\
- name: runs
  mountPath: {RUNS_FOLDER}
- name: identity
  mountPath: {IDENTITY_FOLDER}
  readOnly: true
"""
    pod = _pod(
        objects, "pool", words, objects.coordinator, volumes, mounts, f"- containerPort: {objects.port}"
    )
    return f"""
# The coordinator. The same command is right for the first start and for every restart: --resume auto.
apiVersion: batch/v1
kind: Job
{objects.meta("pool")}
spec:
  completions: 1
  parallelism: 1{_deadline(objects)}
  # Crashes, not evictions: see below.
  backoffLimit: {POOL_CRASHES_MAX}
  # A new pod only when the old one has ended: a pod that is being evicted still writes its last checkpoint.
  podReplacementPolicy: Failed
{_failure_policy("2, 20, 30, 40", "The user's mistake, or training that cannot go on")}
  template:
{textwrap.indent(pod, "    ")}
"""


def nodes_job(objects: RunObjects) -> str:
    words = ["w5xde", "join", f"@{TICKET_FOLDER}/{TICKET}", objects.job, "--wait", WAIT]
    volumes = f"""\
# The ticket alone, without the coordinator's key.
- name: ticket
  secret:
    secretName: {objects.name}
    defaultMode: 0400
    items:
      - key: {TICKET}
        path: {TICKET}
"""
    mounts = f"- name: ticket\n  mountPath: {TICKET_FOLDER}\n  readOnly: true\n"
    pod = _pod(objects, "nodes", words, objects.node, volumes, mounts)
    return f"""
# The nodes. Without completions a Job is a work queue: pods are replaced until one of them says, with exit
# code 0, that the run is over; then no pod is replaced any more. Each pod works as soon as it runs: none
# waits for others.
apiVersion: batch/v1
kind: Job
{objects.meta("nodes")}
spec:
  parallelism: {objects.nodes}{_deadline(objects)}
  backoffLimit: {max(POOL_CRASHES_MAX, NODE_CRASHES_MAX * objects.nodes)}
  podReplacementPolicy: Failed
{_failure_policy("2, 20, 40", "The user's mistake")}
  template:
{textwrap.indent(pod, "    ")}
"""


def _deadline(objects: RunObjects) -> str:
    if objects.deadline_seconds is None:
        return ""
    comment = (
        "# Then the pods end in order, and the Job fails. Delete the Jobs and apply again: the run goes on."
    )
    return f"\n  {comment}\n  activeDeadlineSeconds: {objects.deadline_seconds}"


def _failure_policy(mistakes: str, what: str) -> str:
    return f"""\
  podFailurePolicy:
    rules:
      # {what}: another pod would end the same way.
      - action: FailJob
        onExitCodes:
          operator: In
          values: [{mistakes}]
      # Stopped in order before the run was over: go on, and do not count it.
      - action: Ignore
        onExitCodes:
          operator: In
          values: [75]
      # Evicted, preempted, or on a machine that was shut down, also if the pod had to be killed.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True\""""


def _pod(
    objects: RunObjects,
    component: str,
    words: list[str],
    resources: Resources,
    volumes: str,
    mounts: str,
    ports: str = "",
) -> str:
    """The template of a pod, with what both kinds have in common."""
    if objects.files:
        items = "\n".join(
            f"      - key: {quoted(config_key(name))}\n        path: {quoted(name)}" for name in objects.files
        )
        volumes += f"- name: job\n  configMap:\n    name: {objects.name}\n    items:\n{items}\n"
        mounts += f"- name: job\n  mountPath: {JOB_FOLDER}\n  readOnly: true\n"
    folder = f"\n    # Where w5xde.toml is looked for.\n    workingDir: {JOB_FOLDER}" if objects.files else ""
    listening = f"\n    ports:\n{textwrap.indent(ports, ' ' * 6)}" if ports else ""
    # Kubernetes would put the value of a variable in the place of $(NAME).
    command = listed([word.replace("$(", "$$(") for word in words], 6)
    return f"""\
metadata:
  labels:
{textwrap.indent(objects.labels(component), "    ")}
spec:
  # The Job makes a new pod, so that every end is seen by its rules.
  restartPolicy: Never
  # SIGTERM asks for an orderly end, which takes at most 20 s; after this time comes SIGKILL.
  terminationGracePeriodSeconds: {GRACE_SECONDS}
  # Nothing here talks to Kubernetes.
  automountServiceAccountToken: false
  # Else each Service becomes variables, and those of this one would begin with W5XDE_ like settings.
  enableServiceLinks: false
  # w5xde starts processes; the pod's own first process then collects those that ended.
  shareProcessNamespace: true
  securityContext:
    runAsNonRoot: true
    runAsUser: {USER_ID}
    runAsGroup: {USER_ID}
    # So that this user can write to the volume, and read the Secret.
    fsGroup: {USER_ID}
    # Only once: file by file it would take long, and open private files to the group.
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  containers:
  - name: w5xde
    image: {quoted(objects.image)}
    command:
      {command}{folder}{listening}
    env:
      # The user has no home in the image, and the image is read-only.
      - name: HOME
        value: {SCRATCH_FOLDER}
      - name: USER
        value: w5xde
      - name: W5XDE_STATE
        value: {SCRATCH_FOLDER}/state
      - name: W5XDE_CACHE
        value: {SCRATCH_FOLDER}/cache
      # Lines appear in the log when they are printed.
      - name: PYTHONUNBUFFERED
        value: "1"
    resources:
{textwrap.indent(resources.text, "      ")}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop:
          - ALL
    volumeMounts:
      - name: scratch
        mountPath: {SCRATCH_FOLDER}
{textwrap.indent(mounts.rstrip(), "      ")}
  volumes:
    - name: scratch
      emptyDir: {{}}
{textwrap.indent(volumes.rstrip(), "    ")}"""
