"""The objects for Kubernetes: valid in every version, by its schemas and by rules that these do not hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.deploy.printed import IMAGE, documents, printed, typed_lines
from tests.deploy.rules import broken_rules
from w5xde.cli.parser import build_parser
from w5xde.deploy.kubernetes.yaml_text import block, quoted
from w5xde.errors import NOT_OVER, JobError, StorageError, TrainingError, UsageError

# The oldest that knows podReplacementPolicy by default, to the newest.
VERSIONS = ["1.29", "1.31", "1.33", "1.35", "1.37"]
CHOICES = [
    [],
    ["--namespace", "ml", "--gpus-per-node", "2", "--storage-class", "fast", "--deadline", "12h"],
    ["--access-mode", "ReadWriteMany", "--cpus-per-node", "500m", "--nodes", "1000", "--port", "6000"],
]


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text("job = 1\n")
    return file


def objects(*more: str) -> dict[tuple[str, str], dict[str, Any]]:
    return documents(printed("k8s", "train.py", "--name", "digits", "--image", IMAGE, *more))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("more", CHOICES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_and_has_no_unknown_field(version: str, more: list[str]) -> None:
    for each in objects(*more).values():
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("more", CHOICES)
def test_no_rule_is_broken_that_the_schemas_do_not_hold(more: list[str]) -> None:
    assert [broken for each in objects(*more).values() for broken in broken_rules(each)] == []


def test_the_rules_find_what_the_schemas_do_not() -> None:
    pool = objects()["Job", "w5xde-digits-pool"]
    for path, value in [
        (("template", "spec", "restartPolicy"), "OnFailure"),
        (("template", "spec", "restartPolicy"), "Nevermore"),
        (("podReplacementPolicy",), "TerminatingOrFailed"),
        (("podFailurePolicy", "rules", 0, "action"), "Fail"),
        (("podFailurePolicy", "rules", 0, "onExitCodes", "values"), [40, 2]),
    ]:
        broken = copy.deepcopy(pool)
        inner: Any = broken["spec"]
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)
        assert broken_rules(broken) != [], path


def test_exit_codes_have_the_meaning_that_the_command_gives_them() -> None:
    found = objects()
    pool, nodes = (
        found["Job", f"w5xde-digits-{each}"]["spec"]["podFailurePolicy"]["rules"]
        for each in ("pool", "nodes")
    )
    mistakes = sorted({UsageError.exit_code, JobError.exit_code, StorageError.exit_code})
    assert nodes[0] == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": mistakes}}
    assert pool[0]["onExitCodes"]["values"] == sorted([*mistakes, TrainingError.exit_code])
    for rules in (pool, nodes):
        assert rules[1] == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [NOT_OVER]}}
        assert rules[2]["action"] == "Ignore"
        assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_pods_have_no_rights_that_they_do_not_need() -> None:
    for name in ("pool", "nodes"):
        pod = pod_of(objects()["Job", f"w5xde-digits-{name}"])
        [container] = pod["containers"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # A little more than the 20 s in which SIGTERM ends a coordinator in order.
        assert pod["terminationGracePeriodSeconds"] > 20


def test_nodes_get_the_ticket_and_not_the_key() -> None:
    volumes = pod_of(objects()["Job", "w5xde-digits-nodes"])["volumes"]
    [secret] = [each["secret"] for each in volumes if "secret" in each]
    assert secret["items"] == [{"key": "ticket", "path": "ticket"}]


def test_services_and_policies_find_the_pods_that_they_are_for() -> None:
    found = objects("--port", "6000")
    labels = {
        name: found["Job", f"w5xde-digits-{name}"]["spec"]["template"]["metadata"]["labels"]
        for name in ("pool", "nodes")
    }
    service = found["Service", "w5xde-digits"]["spec"]
    assert service["selector"] == labels["pool"] != labels["nodes"]
    assert service["ports"][0]["port"] == 6000
    pool = found["NetworkPolicy", "w5xde-digits-pool"]["spec"]
    assert pool["podSelector"]["matchLabels"] == labels["pool"]
    [rule] = pool["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": labels["nodes"]}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": 6000}]
    nodes = found["NetworkPolicy", "w5xde-digits-nodes"]["spec"]
    assert nodes["podSelector"]["matchLabels"] == labels["nodes"]
    assert "ingress" not in nodes


def test_nodes_are_a_work_queue_and_the_coordinator_is_one() -> None:
    found = objects("--nodes", "8")
    pool, nodes = (found["Job", f"w5xde-digits-{name}"]["spec"] for name in ("pool", "nodes"))
    assert (pool["completions"], pool["parallelism"]) == (1, 1)
    assert "completions" not in nodes
    assert nodes["parallelism"] == 8


def test_commands_in_the_objects_and_in_the_comments_can_be_typed() -> None:
    text = printed("k8s", "train.py", "--image", IMAGE, "--", "--epochs", "3", "--batch-size", "64")
    found = documents(text)
    for name in ("pool", "nodes"):
        [container] = pod_of(found["Job", f"w5xde-train-{name}"])["containers"]
        given = build_parser().parse_args(container["command"][1:])
        assert given.command == ("serve" if name == "pool" else "join")
    [ticket] = typed_lines(text, "w5xde ticket")
    assert build_parser().parse_args(ticket.split()[1:]).action == "new"
    assert "kubectl create secret generic w5xde-train --from-file=w5xde-train" in text
    assert "kubectl -n ml create secret" in printed("k8s", "train.py", "--image", IMAGE, "--namespace", "ml")


def test_a_dollar_in_a_flag_is_no_variable_of_kubernetes() -> None:
    [container] = pod_of(objects("--", "--compress", "zstd:1")["Job", "w5xde-digits-pool"])["containers"]
    assert container["command"][-2:] == ["--compress", "zstd:1"]
    found = documents(printed("k8s", "/app/$(x).py", "--job-in-image", "--name", "a", "--image", IMAGE))
    [container] = pod_of(found["Job", "w5xde-a-pool"])["containers"]
    assert container["command"][2] == "/app/$$(x).py"


@given(st.text())
def test_any_text_can_be_quoted(text: str) -> None:
    assert yaml.safe_load(f"a: {quoted(text)}\n") == {"a": text}


@given(st.text(alphabet=st.sampled_from("ab \t\n\r#:-'\"|>%\\é\u2028\x85🙂"), max_size=40))
def test_any_file_can_be_held(text: str) -> None:
    assert yaml.safe_load(f'data:\n  "a": {block(text, 4)}\n  b: 1\n') == {"data": {"a": text, "b": 1}}
