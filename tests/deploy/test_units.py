"""The units for systemd: what they say, and a whole training by them with crashes, a stop and a reboot."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deploy.jobs import OPEN, GatedJob
from tests.deploy.printed import printed, typed_lines
from tests.deploy.run_files import TRAINING, audit, compare_with_one_process, step_of
from tests.deploy.services import Service, settings_of, wait_until
from tests.processes import run_python
from tests.sockets import free_port
from w5xde.cli.parser import build_parser
from w5xde.deploy.systemd.units import exec_line
from w5xde.errors import NOT_OVER, JobError, StorageError, TrainingError, UsageError

HOST = "pool.lan"


def units(job: Path, *more: str) -> dict[str, str]:
    """The units that are printed for a job, by their names."""
    text = printed("systemd", str(job), "--name", "digits", "--advertise", HOST, *more)
    _, *parts = re.split(r"^# ===== (\S+) =====\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    file = tmp_path / "train.py"
    file.write_text("job = 1\n")
    return file


def test_exit_codes_have_the_meaning_that_the_command_gives_them(job: Path) -> None:
    coordinator, node = (settings_of(text) for text in units(job).values())
    mistakes = sorted({UsageError.exit_code, JobError.exit_code, StorageError.exit_code})
    assert node["RestartPreventExitStatus"] == [" ".join(map(str, mistakes))]
    more = sorted([*mistakes, TrainingError.exit_code])
    assert coordinator["RestartPreventExitStatus"] == [" ".join(map(str, more))]
    for unit in (coordinator, node):
        assert unit["SuccessExitStatus"] == unit["RestartForceExitStatus"] == [str(NOT_OVER)]
        assert int(unit["TimeoutStopSec"][0]) > 20


def test_commands_in_the_units_and_in_their_comments_can_be_typed(job: Path) -> None:
    for text in units(job, "--", "--epochs", "3").values():
        words = shlex.split(settings_of(text)["ExecStart"][0])
        assert words[0] == str(Path(sys.prefix) / "bin" / "w5xde")
        assert build_parser().parse_args(words[1:]).command in ("serve", "join")
    [line] = typed_lines(units(job)["w5xde-digits.service"], f"sudo {sys.prefix}/bin/w5xde ticket")
    assert build_parser().parse_args(line.split()[2:]).action == "new"


def test_a_node_runs_no_other_code_than_what_is_deployed(job: Path) -> None:
    first = settings_of(units(job)["w5xde-digits-node.service"])["ExecStart"][0]
    assert "--accept-code" in first
    job.write_text("job = 2\n")
    assert settings_of(units(job)["w5xde-digits-node.service"])["ExecStart"][0] != first


def test_what_the_sandbox_would_hide_is_shown_for_reading(job: Path) -> None:
    more = ["--read", "/home/me/images", "--read", "/home/me/images/small", "--read", "/srv/data"]
    coordinator, node = units(job, *more, "--w5xde", "/home/me/venv/bin/w5xde").values()
    homes = ["-/home/me/images", "-/home/me/venv"]
    assert settings_of(node)["BindReadOnlyPaths"] == homes
    assert settings_of(coordinator)["BindReadOnlyPaths"] == [*homes, f"-{job.parent}"]


def test_gpus_are_the_only_devices_that_are_let_in(job: Path) -> None:
    for text in units(job, "--gpus").values():
        found = settings_of(text)
        assert found["DevicePolicy"] == ["closed"]
        assert found["DeviceAllow"] == ["char-nvidia* rw"]
        assert "PrivateDevices" not in found
    assert all("PrivateDevices=yes" in text for text in units(job).values())


def test_words_are_quoted_as_systemd_reads_them() -> None:
    assert exec_line(["a", "%d/b", 'say "x"', "$HOME", "a b\n"]) == r'a %d/b "say \"x\"" "$$HOME" "a b\x0a"'


def test_a_percent_in_a_path_is_no_specifier(tmp_path: Path) -> None:
    folder = tmp_path / "100%d"
    folder.mkdir()
    tmp_path.chmod(0o755)
    (folder / "train.py").write_text("job = 1\n")
    unit = settings_of(units(folder / "train.py")["w5xde-digits.service"])
    assert unit["WorkingDirectory"][0].endswith("/100%%d")
    assert "100%%d/train.py " in unit["ExecStart"][0]


# --- executed -----------------------------------------------------------------------------------------


@contextmanager
def machines(folder: Path, job: GatedJob) -> Iterator[tuple[Service, Service]]:
    """The coordinator's unit on one machine and a node's on another, with the secrets that a user makes."""
    folder.chmod(0o755)
    here, there = folder / "here", folder / "there"
    coordinator, node = units(job.file, "--port", str(free_port()), "--", *TRAINING).values()
    [line] = typed_lines(coordinator, "sudo ")[:1]
    # As root on the coordinator's machine, whose folders are those of the test.
    words = [word.replace("/etc/", f"{here}/etc/") for word in shlex.split(line)[1:]]
    done = run_python(*words)
    assert done.returncode == 0, done.stderr
    place = "etc/w5xde/digits/ticket"
    (there / place).parent.mkdir(parents=True)
    (there / place).write_bytes((here / place).read_bytes())
    # The machine of the node also computes with what it is lent: one node is enough.
    services = (
        Service("w5xde-digits.service", coordinator, here, [HOST]),
        Service("w5xde-digits-node.service", node.replace("--wait", "--nodes 1 --wait"), there, [HOST]),
    )
    try:
        yield services
    finally:
        for each in services:
            each.close()


@pytest.mark.timeout(400)
def test_a_run_survives_crashes_a_stop_and_a_reboot(tmp_path: Path) -> None:
    job = GatedJob(tmp_path)
    with machines(tmp_path, job) as (coordinator, node):
        both, run = [coordinator, node], coordinator.state / "digits"

        def reach(step: int) -> None:
            job.allow(step)
            wait_until(both, lambda: step_of(run) >= step, f"step {step}")

        coordinator.start()
        node.start()
        reach(20)
        # Both crash, one after the other, and come back.
        node.containers[-1].process.kill()
        reach(40)
        coordinator.containers[-1].process.kill()
        reach(60)
        # The coordinator's machine is shut down in order, and boots; the node waits for it.
        coordinator.stop()
        job.allow(70)
        wait_until(both, lambda: not coordinator.is_active, "the coordinator has stopped")
        assert coordinator.ends == [-9, 75]
        assert not coordinator.has_failed
        coordinator.start()
        reach(90)
        job.allow(OPEN)
        wait_until(both, lambda: not coordinator.is_active and not node.is_active, "the run is over")
        assert coordinator.ends[-1] == node.ends[-1] == 0, coordinator.told("not over") + node.told("")
        for each in [*coordinator.containers, *node.containers]:
            assert each.members() == []
            assert "Read-only" not in each.process.text, coordinator.told("wrote elsewhere") + node.told("")
        compare_with_one_process(run, tmp_path / "alone")
        audit(run)
        # After the next boot there is nothing to do: the coordinator says so, the node does not even start.
        starts = len(node.containers)
        coordinator.start()
        node.start()
        wait_until(both, lambda: not coordinator.is_active, "the coordinator has looked")
        assert coordinator.ends[-1] == 0
        assert len(node.containers) == starts


@pytest.mark.timeout(400)
def test_a_mistake_is_told_and_not_tried_again(tmp_path: Path) -> None:
    job = GatedJob(tmp_path)
    with machines(tmp_path, job) as (coordinator, _):
        job.file.write_text("import nowhere\n")
        coordinator.start()
        wait_until([coordinator], lambda: not coordinator.is_active, "the coordinator has ended")
        assert coordinator.ends == [20], coordinator.told("another end")
        assert coordinator.has_failed
        assert "nowhere" in coordinator.containers[0].process.text
