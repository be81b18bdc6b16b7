"""Checks of this machine: Python, torch, device, memory, clock, disk, ports, and computing speed.

Imports torch only inside the checks that need it, so that a broken torch is a finding. Knows no coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from w5xde.config import Settings
from w5xde.doctor.finding import Check, Finding, State
from w5xde.runtime.system.machine import own_addresses
from w5xde.runtime.system.memory import available_bytes

if TYPE_CHECKING:
    import torch

PYTHON_MIN = (3, 11)
# Older releases of 3.11 can install w5xde, but no test runs with them.
PYTHON_TESTED = (3, 11, 5)
TORCH_MIN = (2, 6)
# A node with torch and a small model takes some 300 MB.
MEMORY_BYTES_MIN, MEMORY_BYTES_FEW = 256 * 10**6, 10**9
DISK_BYTES_MIN, DISK_BYTES_FEW = 100 * 10**6, 10**9
YEAR_MIN = 2024
CLOCK_SECONDS_MAX = 2.0
SYNC_SECONDS_MANY = 0.1
SYNCS = 5
FILES_FEW = 256
# Long enough to average out noise, short enough to wait for.
MEASURING_SECONDS = 0.3
MATRIX_SIZE = 512
BATCH, INPUTS, HIDDEN, OUTPUTS = 64, 64, 128, 10


def machine_checks(settings: Settings) -> list[Check]:
    """Return all checks of this machine, quick ones first."""
    return [
        Check("python", 5.0, check_python),
        Check("memory", 5.0, check_memory),
        Check("clock", 10.0, lambda: check_clock(settings.runs)),
        Check("disk", 20.0, lambda: check_disk(settings.runs)),
        Check("files", 5.0, check_files),
        Check("port", 10.0, lambda: check_port(settings.host, settings.port)),
        Check("addresses", 5.0, check_addresses),
        # The first import after an installation reads a gigabyte.
        Check("torch", 120.0, check_torch),
        # A driver that is started for the first time may take long.
        Check("device", 60.0, lambda: check_device(settings.devices)),
        Check("compute", 60.0, lambda: check_compute(settings.devices)),
    ]


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    said = ".".join(map(str, version))
    system = f"{platform.system()} {platform.machine()}"
    if version < PYTHON_TESTED:
        state: State = "error" if version < PYTHON_MIN else "warning"
        fix = f"install Python {'.'.join(map(str, PYTHON_TESTED))} or newer, and w5xde with it"
        yield Finding("python", state, f"{said} is too old ({sys.executable})", fix)
    elif not hasattr(os, "fork"):
        what = f"{said} on {system}, which cannot start nodes of its own"
        fix = "start nodes in other terminals with  w5xde join"
        yield Finding("python", "warning", what, fix, "W5-303")
    else:
        yield Finding("python", "ok", f"{said} on {system}", measured={"version": said})


def check_memory() -> Iterator[Finding]:
    available = available_bytes()
    what = f"{available / 10**9:.1f} GB available"
    measured = {"available_bytes": available, "total_bytes": psutil.virtual_memory().total}
    if available < MEMORY_BYTES_FEW:
        state: State = "error" if available < MEMORY_BYTES_MIN else "warning"
        fix = "close other programs, or start fewer nodes here: each takes about 0.3 GB and its model"
        yield Finding("memory", state, what, fix, measured=measured)
    else:
        yield Finding("memory", "ok", what, measured=measured)


# --- clock and disk -------------------------------------------------------------------------------


def _existing(runs: str) -> Path:
    """Return the runs folder or, if it does not exist yet, the folder that it would be made in."""
    folder = Path(runs).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_clock(runs: str) -> Iterator[Finding]:
    now = datetime.now(UTC)
    if now.year < YEAR_MIN:
        fix = "set it, for example with  sudo timedatectl set-ntp true"
        yield Finding("clock", "error", f"it says {now:%Y-%m-%d %H:%M}, which is long ago", fix)
        return
    difference = 0.0
    # The next check reports a folder that cannot be written.
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=_existing(runs)) as file:
        file.write(b"w5xde")
        file.flush()
        difference = os.fstat(file.fileno()).st_mtime - time.time()
    measured = {"file_system_ahead_seconds": round(difference, 3)}
    if abs(difference) > CLOCK_SECONDS_MAX:
        way = "ahead of" if difference > 0 else "behind"
        what = f"the file system of {runs} is {abs(difference):.0f} s {way} this machine's clock"
        fix = "let both machines set their clocks by the network (NTP); times in logs will not fit else"
        yield Finding("clock", "warning", what, fix, measured=measured)
    else:
        yield Finding("clock", "ok", f"{now:%Y-%m-%d %H:%M} UTC", measured=measured)


def check_disk(runs: str) -> Iterator[Finding]:
    folder = _existing(runs)
    try:
        seconds = _sync_seconds(folder)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        what = f"runs cannot be kept in {Path(runs)}: {error.strerror or error}"
        fix = "choose another folder with --runs, or make this one writable"
        yield Finding("disk", "error", what, fix, "W5-404")
        return
    what = f"{free / 10**9:.1f} GB free in {folder}, {seconds * 1000:.1f} ms to sync"
    measured = {"free_bytes": free, "sync_seconds": round(seconds, 6)}
    if free < DISK_BYTES_FEW:
        state: State = "error" if free < DISK_BYTES_MIN else "warning"
        fix = "make room there, or choose another folder with --runs"
        yield Finding("disk", state, what, fix, "W5-404", measured)
    elif seconds > SYNC_SECONDS_MANY:
        fix = "choose a local disk with --runs; with --durability step every step waits for this"
        yield Finding("disk", "warning", what, fix, measured=measured)
    else:
        yield Finding("disk", "ok", what, measured=measured)


def _sync_seconds(folder: Path) -> float:
    """Return the median time to write and sync a small block."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


# --- limits and the network -----------------------------------------------------------------------


def check_files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:
        yield Finding("files", "ok", "this system does not limit open files")
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_endless = soft == resource.RLIM_INFINITY
    what = "as many open files as wanted" if is_endless else f"{soft:,} open files at a time"
    measured = {"open_files_max": None if is_endless else soft}
    if not is_endless and soft < FILES_FEW:
        fix = "ulimit -n 4096  before w5xde serve: each node that joins takes one"
        yield Finding("files", "warning", what, fix, measured=measured)
    else:
        yield Finding("files", "ok", what, measured=measured)


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Check whether a coordinator could listen there."""
    try:
        kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            if os.name == "posix":
                # As asyncio does: a port whose last connections have just closed is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} of {host} is in use{_user_of(port)}"
            fix = "it may be your own run; else stop it, or choose another --port (0: any that is free)"
            yield Finding("port", "warning", what, fix, "W5-110")
        else:
            what = f"cannot listen on {host} port {port}: {error.strerror or error}"
            fix = "choose another --host (0.0.0.0: every network) or a --port above 1023"
            yield Finding("port", "error", what, fix, "W5-110")
        return
    yield Finding("port", "ok", f"port {port} of {host} is free", measured={"port": port})


def _user_of(port: int) -> str:
    """Return the process that listens on a port, if this user may know."""
    with contextlib.suppress(psutil.Error, OSError, RuntimeError):
        for connection in psutil.net_connections("tcp"):
            is_it = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_it and connection.pid is not None:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def check_addresses() -> Iterator[Finding]:
    found = own_addresses()
    measured = {"addresses": found}
    if all(address.startswith("127.") for address in found):
        fix = "connect this machine to a network if others are to join"
        yield Finding("addresses", "warning", "only this machine can reach itself", fix, measured=measured)
    else:
        what = f"others reach this machine at {', '.join(found)}"
        yield Finding("addresses", "ok", what, measured=measured)


# --- computing ------------------------------------------------------------------------------------


def check_torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a library that is missing or of another system raises many things
        what = f"torch cannot be loaded: {type(error).__name__}: {error}"
        yield Finding("torch", "error", what, "pip install torch")
        return
    version = str(torch.__version__)
    numbers = tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2])
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if numbers < TORCH_MIN:
        least = ".".join(map(str, TORCH_MIN))
        yield Finding("torch", "error", f"{version} is too old", f"pip install 'torch>={least}'")
    elif not _multiplies_well(torch.device("cpu")):
        fix = "install torch anew; if that does not help, test this machine's memory"
        yield Finding("torch", "error", f"{version} multiplies wrongly on the CPU", fix)
    else:
        measured = {"version": version, "cuda": torch.version.cuda}
        yield Finding("torch", "ok", f"{version}, built for {kind}", measured=measured)


def _multiplies_well(device: torch.device) -> bool:
    import torch

    left = torch.arange(64.0, device=device).reshape(8, 8)
    # Whole numbers this small are exact in any order of summation, on any device.
    return bool(torch.equal((left @ left).cpu(), _by_hand(left.cpu())))


def _by_hand(left: torch.Tensor) -> torch.Tensor:
    return (left.unsqueeze(2) * left.unsqueeze(0)).sum(1)


def check_device(wanted: str) -> Iterator[Finding]:
    import torch

    from w5xde.learn.model.device import choose_device, core_count

    device = choose_device(wanted)
    if not _multiplies_well(device):
        fix = "look at its driver; --devices cpu works without it"
        yield Finding("device", "error", f"{device} multiplies wrongly", fix, "W5-301")
        return
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{core_count()} cores"
    measured = {"device": str(device), "cores": core_count()}
    yield Finding("device", "ok", f"{device} ({named})", measured=measured)


def check_compute(wanted: str) -> Iterator[Finding]:
    """Measure how fast one node would be: a matrix product, and a small network forward and backward."""
    import torch
    from torch import nn

    from w5xde.learn.model.device import choose_device, threads

    device = choose_device(wanted)
    with threads(1):
        matrix = torch.rand(MATRIX_SIZE, MATRIX_SIZE, device=device)
        products = _rate(lambda: float((matrix @ matrix)[0, 0]))
        model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS)).to(device)
        inputs = torch.rand(BATCH, INPUTS, device=device)

        def step() -> None:
            loss = model(inputs).square().mean()
            loss.backward()
            float(loss.detach())

        steps = _rate(step)
    gflops = products * 2 * MATRIX_SIZE**3 / 10**9
    samples = steps * BATCH
    what = f"{gflops:,.0f} GFLOP/s in a matrix product, {samples:,.0f} samples/s of a small network"
    measured = {"gflop_per_second": round(gflops, 1), "samples_per_second": round(samples)}
    yield Finding("compute", "ok", f"{what} (one thread)", measured=measured)


def _rate(work: Callable[[], object]) -> float:
    """Return how often the work can be done in a second, one after another."""
    work()
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < MEASURING_SECONDS:
        work()
        count += 1
    return count / passed
