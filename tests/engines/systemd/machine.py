"""A machine with a systemd of its own, made of namespaces: it boots in seconds, and nothing outlives it.

Its units run in their whole sandbox: users, credentials, folders and filters of system calls are systemd's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.processes import wait_until

BOOT = Path(__file__).parent / "boot.sh"
CGROUPS = Path("/sys/fs/cgroup")


class Machine:
    """Boots when it is entered; `reboot` loses all processes and keeps the disk."""

    def __init__(self, disk: Path) -> None:
        assert os.geteuid() == 0, "a machine with its own systemd needs root: run this as root"
        self._disk, self._log = disk, disk.with_suffix(".log")
        # The unified hierarchy, also where older ones lie beside it.
        base = CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS
        self._group = base / f"w5xde-test-{uuid.uuid4().hex[:8]}"
        self._outer: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None

    def __enter__(self) -> Machine:
        self._disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(self._disk)], check=True)
        self._boot()
        return self

    def __exit__(self, *error: object) -> None:
        self._power_off()
        subprocess.run(["umount", "--lazy", str(self._disk)], check=True)

    @property
    def root(self) -> Path:
        """The file system of the machine, as it is seen from here."""
        assert self._init is not None
        return Path(f"/proc/{self._init.pid}/root")

    def reboot(self) -> None:
        """As a power cut and its end: every process is killed at once, and the machine boots."""
        self._power_off()
        self._boot()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command there, as root."""
        assert self._init is not None
        enter = ["nsenter", "--target", str(self._init.pid), "--all", "--root", "--wdns=/"]
        return subprocess.run([*enter, *words], capture_output=True, text=True, check=False, timeout=120)

    def type(self, *words: str) -> str:
        """Run a command there that must succeed, and return what it prints."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.type("systemctl", "show", unit, f"--property={','.join(names)}")
        return dict(line.split("=", 1) for line in text.splitlines())

    def journal(self, unit: str) -> str:
        """What a unit printed since the machine was made."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout

    def kill(self, unit: str) -> None:
        """Kill the main process of a unit."""
        self.type("systemctl", "kill", "--kill-whom=main", "--signal=KILL", unit)

    def _boot(self) -> None:
        self._group.mkdir()
        with self._log.open("ab") as log:
            words = ["bash", str(BOOT), str(self._disk), str(self._group)]
            self._outer = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        outer = psutil.Process(self._outer.pid)
        wait_until(lambda: self._find(outer), lambda: "systemd does not start")
        is_up = ["systemctl", "is-active", "multi-user.target"]
        wait_until(lambda: self.run(*is_up).returncode == 0, lambda: self.run("systemctl", "status").stdout)

    def _find(self, outer: psutil.Process) -> bool:
        assert self._outer is not None
        assert self._outer.poll() is None, f"the machine cannot be made:\n{self._log.read_text()}"
        with suppress(psutil.Error):
            for each in outer.children():
                if each.name() == "systemd":
                    self._init = each
                    return True
        return False

    def _power_off(self) -> None:
        """Kill the first process of the machine, and so every other one."""
        if self._outer is not None:
            if self._init is not None:
                with suppress(psutil.NoSuchProcess):
                    self._init.send_signal(signal.SIGKILL)
            else:
                self._outer.kill()
            self._outer.wait()
        self._init = self._outer = None
        # systemd made groups below it; a group can go when the processes in it have.
        for folder, _, _ in os.walk(self._group, topdown=False):
            wait_until(partial(_removed, Path(folder)), partial("{} is in use".format, folder))


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()
