"""The units on a machine with a systemd of its own: a whole training with crashes, a stop and a power cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.contained import wait_while
from tests.deploy.jobs import OPEN, GatedJob, allow
from tests.deploy.printed import typed_lines
from tests.deploy.run_files import TRAINING, compare_with_one_process, step_of
from tests.engines.systemd.machine import Machine

COORDINATOR, NODE = "w5xde-digits", "w5xde-digits-node"
W5XDE = str(Path(sys.prefix) / "bin" / "w5xde")


class Deployed:
    """A job on a machine, with its units installed and enabled by the lines that a user types."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._job_folder.mkdir()
        GatedJob(self._job_folder, seen_as="/srv/job")
        choices = ["--name", "digits", "--advertise", "pool.lan", "--out", "/srv/units"]
        machine.type(W5XDE, "deploy", "systemd", "/srv/job/train.py", *choices, "--", *TRAINING)
        for unit in (COORDINATOR, NODE):
            text = (machine.root / f"srv/units/{unit}.service").read_text()
            for line in typed_lines(text, "sudo "):
                # One machine is both, and has its ticket already.
                if "install" not in line:
                    machine.type("sh", "-c", f"cd /srv/units && {line.removeprefix('sudo ')}")

    @property
    def _job_folder(self) -> Path:
        return self._machine.root / "srv/job"

    @property
    def run(self) -> Path:
        return self._machine.root / "var/lib/private" / COORDINATOR / "digits"

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        def told() -> str:
            return self._machine.journal(COORDINATOR) + self._machine.journal(NODE)

        wait_while(lambda: None, is_so, told)

    def reach(self, step: int) -> None:
        """Let the run make so many steps, and wait until it has made them."""
        allow(self._job_folder, step)
        self.wait_until(lambda: step_of(self.run) >= step)

    def finish(self) -> None:
        allow(self._job_folder, OPEN)
        self.wait_until(lambda: {self.state(COORDINATOR), self.state(NODE)} == {"inactive"})

    def state(self, unit: str) -> str:
        return self._machine.show(unit, "ActiveState")["ActiveState"]


@pytest.mark.timeout(900)
def test_the_units_run_in_their_sandbox_and_survive_everything(tmp_path: Path) -> None:
    with Machine(tmp_path / "disk") as machine:
        deployed = Deployed(machine)
        deployed.reach(20)
        found = machine.show(COORDINATOR, "DynamicUser", "NRestarts")
        assert found == {"DynamicUser": "yes", "NRestarts": "0"}
        # Both crash, and come back.
        machine.kill(NODE)
        machine.kill(COORDINATOR)
        deployed.reach(40)
        assert machine.show(COORDINATOR, "NRestarts")["NRestarts"] == "1"
        # An orderly stop is no failure; its nodes wait.
        machine.type("systemctl", "stop", COORDINATOR)
        stopped = machine.show(COORDINATOR, "ActiveState", "Result", "ExecMainStatus")
        assert stopped == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "75"}
        machine.type("systemctl", "start", COORDINATOR)
        deployed.reach(60)
        # Nobody starts the units after a power cut.
        machine.reboot()
        deployed.reach(90)
        deployed.finish()
        for unit in (COORDINATOR, NODE):
            ended = machine.show(unit, "Result", "ExecMainStatus")
            assert ended == {"Result": "success", "ExecMainStatus": "0"}, machine.journal(unit)
        compare_with_one_process(deployed.run, tmp_path / "alone")
        machine.type(W5XDE, "audit", "digits", "--runs", f"/var/lib/{COORDINATOR}")
        # After the next boot there is nothing to do.
        machine.reboot()
        deployed.wait_until(lambda: deployed.state(COORDINATOR) == "inactive")
        assert machine.show(COORDINATOR, "Result", "ExecMainStatus") == {
            "Result": "success",
            "ExecMainStatus": "0",
        }
        assert machine.show(NODE, "ConditionResult")["ConditionResult"] == "no"
