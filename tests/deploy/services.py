"""A small systemd: it reads units that `w5xde deploy systemd` prints, and starts commands by their rules.

What is as there: specifiers, quotes and doubled dollars in commands, `Environment`, `StateDirectory` and
`CacheDirectory`, credentials (copies that only the unit reads), conditions, `Restart` with its lists of exit
codes, `ExecStopPost`, `KillMode=mixed` and `TimeoutStopSec`. What is not: the sandbox (for Python's own files
it is kept: see `contained.py`), waiting between restarts, dependencies between units.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from tests.deploy.contained import Container, Mounts, Start, lines_of, wait_while

# How often a unit may start in a test: far more than any of them needs.
STARTS_MAX = 20


def settings_of(unit: str) -> dict[str, list[str]]:
    """The settings of a unit, each with its values in order. No two sections of ours share a name."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            found[name].append(value)
    return found


class Service:
    """One unit on one machine."""

    def __init__(self, name: str, unit: str, machine: Path, hosts: list[str]) -> None:
        self.name, self._settings = name.removesuffix(".service"), settings_of(unit)
        self._machine, self._hosts = machine, hosts
        self.containers: list[Container] = []
        # The exit code of each start; negative: a signal.
        self.ends: list[int] = []
        self._judged: Container | None = None
        self._stopped_at: float | None = None
        self._specifiers = {
            "%S": "/var/lib",
            "%C": "/var/cache",
            "%d": f"/run/credentials/{name}",
            "%%": "%",
        }

    # --- what the unit says -----------------------------------------------------------------------

    def _values(self, name: str) -> list[str]:
        return [
            re.sub("%.", lambda found: self._specifiers[found[0]], value) for value in self._settings[name]
        ]

    def _value(self, name: str) -> str:
        [found] = self._values(name)
        return found

    def _codes(self, name: str) -> list[int]:
        return [int(code) for value in self._values(name) for code in value.split()]

    def _command(self, name: str) -> list[str]:
        return [word.replace("$$", "$") for word in shlex.split(self._value(name))]

    @property
    def state(self) -> Path:
        """The folder of the unit's state."""
        return self._machine / "var/lib" / self._value("StateDirectory")

    def _mounts(self) -> Mounts:
        """The folders of the machine that the unit sees elsewhere, made as systemd makes them."""
        folders = {"/var/lib": self._machine / "var/lib", "/var/cache": self._machine / "var/cache"}
        own = [("/var/lib", each) for each in self._values("StateDirectory")]
        own += [("/var/cache", each) for each in self._values("CacheDirectory")]
        for base, name in own:
            (folders[base] / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        credentials = self._machine / "credentials" / f"{self.name}-{len(self.containers)}"
        credentials.mkdir(parents=True)
        for value in self._values("LoadCredential"):
            name, _, source = value.partition(":")
            (credentials / name).write_bytes((self._machine / source.lstrip("/")).read_bytes())
            (credentials / name).chmod(0o400)
        credentials.chmod(0o500)
        scratch = self._machine / "scratch"
        scratch.mkdir(exist_ok=True)
        writable = {f"{base}/{name}": folders[base] / name for base, name in own}
        return Mounts({**folders, **writable, self._specifiers["%d"]: credentials}, list(writable), scratch)

    # --- what is done -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the unit, as `systemctl start` or a boot does."""
        self._stopped_at = None
        if self._conditions_hold():
            self._start()

    def _conditions_hold(self) -> bool:
        for value in self._values("ConditionPathExists"):
            path = self._machine / value.lstrip("!/")
            if path.exists() == value.startswith("!"):
                return False
        return True

    def _start(self) -> None:
        assert len(self.containers) < STARTS_MAX, self.told("starts without an end")
        mounts = self._mounts()
        variables = {"STATE_DIRECTORY": str(self.state)}
        for value in self._values("Environment"):
            variables |= dict(word.split("=", 1) for word in value.split())
        folder = self._value("WorkingDirectory") if self._settings["WorkingDirectory"] else "/"
        start = Start(self._command("ExecStart"), variables, mounts, folder, self._hosts)
        output = self._machine / f"{self.name}-{len(self.containers)}.log"
        self.containers.append(Container.start(start, output))

    @property
    def is_active(self) -> bool:
        return bool(self.containers) and self.containers[-1] is not self._judged

    def stop(self) -> None:
        """As `systemctl stop` does, which also keeps the unit from starting again."""
        self._stopped_at = time.monotonic()
        self.containers[-1].ask_to_end()

    def look(self) -> None:
        """Note the end of the command, and start it again if the unit says so."""
        if not self.is_active:
            return
        container = self.containers[-1]
        status = container.process.poll()
        if status is None:
            limit = float(self._value("TimeoutStopSec"))
            assert self._stopped_at is None or time.monotonic() - self._stopped_at < limit, self.told("slow")
            return
        self._judged = container
        self.ends.append(status)
        if status >= 0:
            container.wait_for_members()
        container.kill_members()
        self._after(status)
        if self._stopped_at is None and self._starts_again(status):
            self._start()

    def _after(self, status: int) -> None:
        if not self._settings["ExecStopPost"]:
            return
        variables = {"EXIT_STATUS": str(status), "STATE_DIRECTORY": str(self.state), "PATH": "/usr/bin:/bin"}
        subprocess.run(self._command("ExecStopPost"), env=variables, check=True)

    def _starts_again(self, status: int) -> bool:
        assert self._value("Restart") == "on-failure"
        if status in self._codes("RestartPreventExitStatus"):
            return False
        if status in self._codes("RestartForceExitStatus"):
            return True
        return status != 0 and status not in self._codes("SuccessExitStatus")

    @property
    def has_failed(self) -> bool:
        """Whether systemd shows the unit as failed."""
        return not self.is_active and self.ends[-1] not in [0, *self._codes("SuccessExitStatus")]

    def told(self, what: str) -> str:
        return "\n".join([f"{self.name}: {what}, ends {self.ends}", *lines_of(self.containers)])

    def close(self) -> None:
        for each in self.containers:
            each.close()


def wait_until(services: list[Service], is_so: Callable[[], bool], what: str) -> None:
    """Let the units work until the condition holds."""

    def look() -> None:
        for each in services:
            each.look()

    wait_while(look, is_so, lambda: "\n".join(each.told(f"not so: {what}") for each in services))
