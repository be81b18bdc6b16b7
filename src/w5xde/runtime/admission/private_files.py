"""Files that only their owner may read: made so, checked when read, replaced whole or not at all.

    STATE/      $W5XDE_STATE, else $XDG_STATE_HOME/w5xde, else ~/.local/state/w5xde
      runs/       a coordinator's keys        nodes/   a node's credentials

A key that others could read is no key any more, so wrong permissions are an error and nothing is mended in
silence: whoever looked may have looked already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from w5xde.errors import StorageError
from w5xde.runs import STATE_VARIABLE

HAS_MODES = os.name == "posix"
BYTES_MAX = 32 * 1024 * 1024
# A change takes milliseconds; who holds a lock longer has been stopped, and must not stop us as well.
LOCK_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.01
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this user's keys and credentials are: not in run folders, which are copied and shared."""
    if named := environ.get(STATE_VARIABLE):
        return Path(named).expanduser()
    base = environ.get("XDG_STATE_HOME", "")
    # The convention says that a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local/state") / "w5xde"


def make_folder(base: Path, *names: str) -> Path:
    """The folder of these names below the base, and all on the way; nobody else may look into them."""
    folder = base
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for name in ("", *names):
            folder /= name
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                sync_folder(folder.parent)
            _check(os.lstat(folder), folder, is_folder=True)
    except OSError as error:
        raise _trouble(folder, error) from error
    return folder


def read(file: Path) -> bytes:
    """All of a private file. FileNotFoundError if there is none; StorageError if it is not private."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | _NO_FOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _trouble(file, error) from error
    with os.fdopen(handle, "rb") as opened:
        # Of what is open, not of what the name means by now.
        _check(os.fstat(handle), file, is_folder=False)
        data = opened.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise StorageError(f"{file} is larger than anything we write", code="W5-411", fix="look what it is")
    return data


def replace(file: Path, data: bytes) -> None:
    """Put this in place of a file, or where there is none: whole or not at all, and synced.

    One at a time: whoever writes a file holds the lock that belongs to it.
    """
    aside = file.with_name(f".{file.name}.new")
    try:
        # Of one who was killed half-way.
        aside.unlink(missing_ok=True)
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
        try:
            with os.fdopen(handle, "wb") as opened:
                opened.write(data)
                opened.flush()
                os.fsync(handle)
            aside.replace(file)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(file.parent)
    except OSError as error:
        raise _trouble(file, error) from error


def remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
        sync_folder(file.parent)
    except OSError as error:
        raise _trouble(file, error) from error


def sync_folder(folder: Path) -> None:
    if not HAS_MODES:
        return  # Windows keeps names by itself, and opens no folders
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(file: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold this lock file meanwhile; StorageError if another process does, for longer than this."""
    handle = hold(file, seconds)
    if handle is None:
        raise StorageError(
            f"another process has held {file} for {seconds:.0f} s",
            code="W5-412",
            fix="end the w5xde command that was stopped half-way, and try again",
        )
    try:
        yield
    finally:
        os.close(handle)


def hold(file: Path, seconds: float = 0.0) -> int | None:
    """Take a lock file and keep it until the handle is closed, or this process ends; None: it is taken."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
    except OSError as error:
        raise _trouble(file, error) from error
    deadline = time.monotonic() + seconds
    while not _try_lock(handle):
        if time.monotonic() >= deadline:
            os.close(handle)
            return None
        time.sleep(_LOCK_POLL_SECONDS)
    return handle


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _check(found: os.stat_result, path: Path, *, is_folder: bool) -> None:
    noun, mode = ("folder", 0o700) if is_folder else ("file", 0o600)
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(found.st_mode):
        raise StorageError(f"{path} is not a {noun}", code="W5-410", fix="move it away")
    if not HAS_MODES:
        return
    if found.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to another user (uid {found.st_uid})",
            code="W5-410",
            why="what it holds lets nodes join and must be this user's alone",
            fix="run as that user, or name another folder with W5XDE_STATE",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}, not {mode:04o})",
            code="W5-410",
            why="who has read it can pass for this run or this node",
            fix=f"chmod {mode:o} {path} ; if others may have read it, remove it and join or start anew",
        )


def _trouble(path: Path, error: OSError) -> StorageError:
    if error.errno == errno.ELOOP:
        return StorageError(f"{path} is a link", code="W5-410", fix="put the file itself there")
    return StorageError(
        f"{path} cannot be used: {error.strerror or error}",
        code="W5-411",
        fix="make room or mend its permissions, or name another folder with W5XDE_STATE",
    )
