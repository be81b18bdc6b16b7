"""Rules of Kubernetes that its schemas do not hold; the server refuses what breaks them. Reads objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ENUMS = {
    "restartPolicy": {"Never", "OnFailure", "Always"},
    "podReplacementPolicy": {"Failed", "TerminatingOrFailed"},
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "operator": {"In", "NotIn"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "protocol": {"TCP", "UDP", "SCTP"},
}
LISTED_ENUMS = {
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "policyTypes": {"Ingress", "Egress"},
}
LABEL_CHARACTERS_MAX = 63
# Of the name of a pod, which the Job makes: a dash and five characters.
POD_SUFFIX = 6


def broken_rules(document: dict[str, Any]) -> list[str]:
    """What the server would not take, or would take and never run."""
    found = list(_enums(document, document["kind"]))
    name = document["metadata"]["name"]
    if len(name) + POD_SUFFIX > LABEL_CHARACTERS_MAX + POD_SUFFIX:
        found.append(f"{name} is too long")
    if document["kind"] == "Job":
        found += _job(document["spec"])
    return found


def _enums(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ENUMS and isinstance(inner, str) and inner not in ENUMS[key]:
                yield f"{path}.{key}: {inner}"
            if key in LISTED_ENUMS and not set(inner) <= LISTED_ENUMS[key]:
                yield f"{path}.{key}: {inner}"
            yield from _enums(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _enums(inner, path)


def _job(spec: dict[str, Any]) -> Iterator[str]:
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield "a Job restarts Never or OnFailure"
    if "podFailurePolicy" in spec:
        if pod.get("restartPolicy") != "Never":
            yield "podFailurePolicy needs restartPolicy Never"
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield "podFailurePolicy needs podReplacementPolicy Failed"
        yield from _failure_rules(spec["podFailurePolicy"]["rules"])
    if spec.get("completions") is None and spec.get("completionMode", "NonIndexed") != "NonIndexed":
        yield "an indexed Job needs completions"
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        mounts = container.get("volumeMounts", [])
        if not {mount["name"] for mount in mounts} <= volumes:
            yield "a mount of a volume that does not exist"
        paths = [mount["mountPath"] for mount in mounts]
        if len(set(paths)) < len(paths):
            yield "two mounts at one path"
        limits = container["resources"]["limits"]
        if any(limits.get(key) != value for key, value in container["resources"]["requests"].items()):
            yield "what is requested is not the limit"


def _failure_rules(rules: list[dict[str, Any]]) -> Iterator[str]:
    for rule in rules:
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a rule has either exit codes or conditions"
        codes = rule.get("onExitCodes", {}).get("values", [1])
        if codes != sorted(set(codes)) or 0 in codes or not codes:
            yield f"exit codes must be in order, without 0: {codes}"
        for condition in rule.get("onPodConditions", []):
            if condition.get("status", "True") not in ("True", "False", "Unknown"):
                yield f"a condition is True, False or Unknown: {condition}"
