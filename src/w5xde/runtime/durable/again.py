"""The same command again: what `--resume auto` finds in the folder of its run, and who may work there.

    no folder, or one in which nothing began     the run begins
    a manifest                                   the run goes on, as with --resume NAME
    a manifest whose run is complete             there is nothing to do: its result is at hand
    a folder that another process holds          it may be ending: wait a moment, then give up for now

Loads no torch before it is needed, so that a command whose run is complete ends at once.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from w5xde.config import Settings
from w5xde.errors import BusyError, StorageError
from w5xde.runs import MANIFEST, MODEL, read_manifest
from w5xde.runtime.durable.disk import RealDisk
from w5xde.runtime.durable.lock import IN_USE, RunLock
from w5xde.runtime.durable.lock import NAME as LOCK
from w5xde.setting_sources import SettingSources

if TYPE_CHECKING:
    from torch.nn import Module

    from w5xde.learn.job.job import Job

# An earlier coordinator that was told to end does so within 20 s; the lock of one that died on another host
# may be held by its file server a little longer.
WAIT_SECONDS = 30.0
LOOK_SECONDS = 0.2
# The files of a coordinator that was killed before it wrote its first manifest, and so before any node came.
_LEFT_OVER = re.compile(
    r"lock|(metrics|trace)\.jsonl|tickets\.(json|lock)|\.tickets\.json\.new|ledger-\d+\.jsonl|[\w.-]+\.tmp"
    r"|checkpoints|\.nfs\w+"
)
# A ledger with such a record is that of a run that trained.
_LENT = b'"kind":"lend"'


class FinishedRun(NamedTuple):
    """The result of a run that has ended, as its manifest has it."""

    folder: Path
    summary: dict[str, Any]
    reason: str

    @property
    def is_over(self) -> bool:
        """Whether the run is complete; not if an interrupt stopped it."""
        return bool(self.summary["over"])

    def load_model(self, job: Job, seed: int) -> Module:
        """The job's model with the weights that the run saved."""
        from w5xde.learn.job.build import build_model
        from w5xde.learn.step.checkpoint import load_model

        model = build_model(job, seed)
        load_model(model, (self.folder / MODEL).read_bytes())
        return model


def find_finished(settings: Settings) -> FinishedRun | None:
    """The result of the run that these settings continue, if it is complete and they ask for no more."""
    if not settings.goes_on:
        return None
    folder = Path(settings.runs) / str(settings.name)
    manifest = read_manifest(folder)
    result, reason = manifest.get("result"), manifest.get("reason")
    if not isinstance(result, dict) or not isinstance(reason, str) or result.get("over") is not True:
        return None
    # If its weights are gone, the run goes on from its last checkpoint, and saves them again.
    if not (folder / MODEL).is_file() or _asks_for_more(manifest["settings"], settings):
        return None
    return FinishedRun(folder, result, reason)


def _asks_for_more(earlier: dict[str, Any], settings: Settings) -> bool:
    """Whether a limit is higher than that with which the run was complete."""
    before = msgspec.convert(
        {key: earlier.get(key) for key in ("epochs", "steps", "seconds")}, Settings, strict=False
    )
    limits = [(each.epoch_limit, each.steps, each.seconds) for each in (before, settings)]
    return any(was is not None and (now is None or now > was) for was, now in zip(*limits, strict=True))


class RunClaim:
    """What a command found of its run, and the lock of the run's folder until a `RunFolder` takes it."""

    def __init__(self, finished: FinishedRun | None = None, lock: RunLock | None = None) -> None:
        self.finished = finished
        self._lock = lock

    def take(self) -> RunLock | None:
        """Hand the lock over; None if nothing was locked, because the command is not for `--resume auto`."""
        lock, self._lock = self._lock, None
        return lock

    def close(self) -> None:
        """Give the folder back; remove it if the lock is all that is in it."""
        lock = self.take()
        if lock is None:
            return
        with contextlib.suppress(OSError):
            if [path.name for path in lock.folder.iterdir()] == [LOCK]:
                (lock.folder / LOCK).unlink()
                lock.folder.rmdir()
        lock.release()


@contextlib.contextmanager
def claim_run(sources: SettingSources, note: Callable[[str], None]) -> Iterator[RunClaim]:
    """Find out what is to be done for a command; with `--resume auto` hold the folder of its run meanwhile.

    The settings are to be resolved after this. `note` tells the user a sentence.
    """
    if not sources.is_same_again:
        yield RunClaim()
        return
    settings = sources.resolve()
    finished = find_finished(settings)
    if finished is not None:
        yield RunClaim(finished)
        return
    folder = Path(settings.runs) / str(settings.name)
    claim = RunClaim()
    try:
        try:
            claim = RunClaim(lock=wait_for_lock(folder, note))
            if not (folder / MANIFEST).exists():
                _clear_left_over(folder)
        except OSError as error:
            raise folder_error(folder, error) from error
        # Whoever held the folder may have trained the run to its end.
        claim.finished = find_finished(sources.resolve())
        yield claim
    finally:
        claim.close()


def wait_for_lock(folder: Path, note: Callable[[str], None]) -> RunLock:
    """Lock the folder of a run, which is made if there is none."""
    deadline, is_told = time.monotonic() + WAIT_SECONDS, False
    while True:
        make_folder(folder, exist_ok=True)
        try:
            return RunLock(folder)
        except FileNotFoundError:
            continue  # a command that failed has just removed it
        except StorageError as error:
            if error.code != IN_USE:
                raise
            if time.monotonic() > deadline:
                raise BusyError(
                    f"{error.what}, and has been for {WAIT_SECONDS:.0f} s",
                    code="W5-416",
                    why="two coordinators cannot own one run, and the other one may be about to end",
                    fix="try again later with the same command, or stop the other one first",
                ) from None
            if not is_told:
                note(f"{error.what}; waiting up to {WAIT_SECONDS:.0f} s for it to end")
                is_told = True
        time.sleep(LOOK_SECONDS)


def make_folder(folder: Path, *, exist_ok: bool = False) -> None:
    """Make the folder of a run, durably."""
    try:
        # FileExistsError here: --runs names a file, or another run took the name this very moment.
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=exist_ok)
        RealDisk(folder.parent).sync_folder()
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be made: {error.strerror}",
            code="W5-404",
            fix="choose another folder with --runs",
        ) from error


def folder_error(folder: Path, error: OSError) -> StorageError:
    """The error for a folder that cannot be used."""
    return StorageError(
        f"the run folder {folder} cannot be used: {error.strerror or error}",
        code="W5-404",
        fix="make room there, or choose another folder with --runs",
    )


def _clear_left_over(folder: Path) -> None:
    """Remove the files of a start that was killed before the run began; refuse a folder with others."""
    found = sorted(folder.iterdir())
    foreign = [path.name for path in found if not _LEFT_OVER.fullmatch(path.name) or _has_trained(path)]
    if foreign:
        raise StorageError(
            f"{folder} has no {MANIFEST}, and is not empty: it has {', '.join(foreign[:3])}",
            code="W5-415",
            why="no run can begin there without removing what may be of use",
            fix=f"restore {MANIFEST} from a copy, remove the folder, or choose another --name",
        )
    for path in found:
        if path.is_dir():
            path.rmdir()
        elif path.name != LOCK:
            path.unlink()


def _has_trained(path: Path) -> bool:
    """Whether a part of a run's folder holds anything that was trained."""
    if path.is_dir():
        return any(path.iterdir())
    return path.suffix == ".jsonl" and path.name.startswith("ledger") and _LENT in path.read_bytes()
