"""The units for systemd, judged by systemd-analyze, which needs no running systemd."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from w5xde.cli.main import main

CHOICES = [[], ["--gpus", "--read", "/home/me/images", "--", "--compress", "up: int8, down: lz4"]]
# Of 10, where less is better; 252 says 1.2, and 1.4 with GPUs. The rest is above all the network. Others
# versions weigh a little differently.
EXPOSURE_MAX = 1.5
EXPOSURE_WITH_GPUS_MAX = 1.7


def analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, check=False, timeout=60
    )


def make_units(folder: Path, more: list[str]) -> list[Path]:
    folder.chmod(0o755)
    job = folder / "train.py"
    job.write_text("job = 1\n")
    out = folder / "units"
    words = ["systemd", str(job), "--name", "digits", "--advertise", "pool.lan", "--out", str(out), *more]
    assert main(["deploy", *words]) == 0
    return sorted(out.iterdir())


@pytest.mark.parametrize("more", CHOICES)
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path, more: list[str]) -> None:
    for unit in make_units(tmp_path, more):
        done = analyze("verify", str(unit))
        # What it does not know it only warns of.
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_would_tell_a_typing_error(tmp_path: Path) -> None:
    unit = make_units(tmp_path, [])[0]
    unit.write_text(unit.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    assert "NoNewPrivilege" in analyze("verify", str(unit)).stderr


@pytest.mark.parametrize(("more", "most"), [(CHOICES[0], EXPOSURE_MAX), (CHOICES[1], EXPOSURE_WITH_GPUS_MAX)])
def test_the_units_are_exposed_to_little(tmp_path: Path, more: list[str], most: float) -> None:
    for unit in make_units(tmp_path, more):
        done = analyze("security", "--offline=true", f"--threshold={most * 10:.0f}", str(unit))
        found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
        assert found is not None, done.stdout + done.stderr
        assert float(found[1]) <= most, done.stdout
        assert done.returncode == 0
