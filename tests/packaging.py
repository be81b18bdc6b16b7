"""`make package`: builds the wheel and the source distribution, and tries the wheel in a clean environment.

    python -m tests.packaging

Both are built in `dist/`. The source distribution must give the same wheel. The wheel is installed with its
dependencies from the package index; torch alone is lent by this environment, because it is a large download.
Then the command must say its version and train. Knows nothing of what the package does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
# Files that are no modules, and that the package needs.
NEEDED = {
    "w5xde/py.typed",
    "w5xde/datasets/digits.npz",
    "w5xde/page/static/index.html",
    "w5xde/page/vendor/uPlot.iife.min.js",
}
LENT = "torch"


def say(text: str) -> None:
    print(text, flush=True)


def run(*words: str | Path, cwd: Path) -> str:
    """Run a program to its end, and return what it printed; end here if it fails."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "W5XDE"))}
    command = [str(word) for word in words]
    done = subprocess.run(command, check=False, cwd=cwd, env=clean, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def pip(python: Path, *words: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", "-qq", *words, cwd=cwd)


def new_environment(folder: Path) -> Path:
    """Make a virtual environment with nothing but pip; returns its interpreter."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def build(work: Path) -> Path:
    """Build both distributions, and return the wheel."""
    for old in DIST.glob("w5xde-*"):
        old.unlink()
    python = new_environment(work / "build")
    pip(python, "install", "-c", ROOT / "constraints.txt", "hatchling", cwd=work)
    run(python, "-m", "hatchling", "build", "-d", DIST, cwd=ROOT)
    [source], [wheel] = DIST.glob("w5xde-*.tar.gz"), DIST.glob("w5xde-*.whl")
    pip(python, "wheel", "--no-deps", "--no-build-isolation", "-w", work, source, cwd=work)
    if contents(work / wheel.name) != contents(wheel):
        sys.exit(f"{source.name} gives another wheel than this folder does")
    missing = NEEDED - contents(wheel).keys()
    strays = {name for name in contents(wheel) if not name.startswith(("w5xde/", "w5xde-"))}
    if missing or strays:
        sys.exit(f"{wheel.name} lacks {sorted(missing)}, and should not have {sorted(strays)}")
    size = f"{wheel.stat().st_size / 1e6:.1f} MB"
    say(f"built {source.relative_to(ROOT)} and {wheel.relative_to(ROOT)} ({size})")
    return wheel


def contents(wheel: Path) -> dict[str, int]:
    """The names of the files in a wheel, and their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def required(name: str, known: set[str]) -> Iterator[str]:
    """A distribution that is installed here, and all that it requires."""
    if name in known:
        return
    known.add(name)
    try:
        requirements = distribution(name).requires or []
    except PackageNotFoundError:
        return  # for another system
    yield name
    for each in requirements:
        if "extra ==" not in each:
            yield from required(re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0], known)


def lend(python: Path, folder: Path) -> None:
    """Let another environment import torch and what it requires from this one, and nothing else of it."""
    folder.mkdir()
    for name in required(LENT, set()):
        here = distribution(name)
        for top in {file.parts[0] for file in here.files or [] if file.parts[0] != ".."}:
            place = Path(str(here.locate_file(top)))
            if place.exists() and top != "__pycache__" and not (folder / top).exists():
                (folder / top).symlink_to(place)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(packages.strip()) / "lent.pth").write_text(f"{folder}\n", encoding="utf-8")


def try_wheel(wheel: Path, work: Path) -> None:
    """Install the wheel in a clean environment, and train with it, far from this folder."""
    python = new_environment(work / "clean")
    lend(python, work / "lent")
    pip(python, "install", "-c", ROOT / "constraints.txt", wheel, cwd=work)
    command = python.parent / "w5xde"
    version = run(command, "--version", cwd=work).strip()
    if wheel.name.split("-")[1] not in version:
        sys.exit(f"{wheel.name} says that it is {version}")
    place = run(python, "-c", "import w5xde; print(w5xde.__file__)", cwd=work).strip()
    if not place.startswith(str(work)):
        sys.exit(f"not the wheel was tried, but {place}")
    result = json.loads(run(command, "demo", "--json", cwd=work))
    if result["weights_sha256"] != result["alone_sha256"]:
        sys.exit("the demo of the wheel trains other weights than one process does")
    sha256 = result["weights_sha256"][:16]
    say(f"{version} trains in a clean environment: {result['steps']} steps, sha256 {sha256}…")


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="w5xde-package-") as folder:
        work = Path(folder).resolve()
        try_wheel(build(work), work)
    say(f"in {time.monotonic() - began:.0f} s with Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
