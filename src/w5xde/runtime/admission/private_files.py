"""Private files: only their owner can read them, and each is replaced whole or not at all.

    STATE/      $W5XDE_STATE, else $XDG_STATE_HOME/w5xde, else ~/.local/state/w5xde
      runs/       a coordinator's keys        nodes/   a node's credentials        code/   accepted code

A key that others could read is no secret any more. So wrong permissions are an error and are never repaired
in silence: another user may have read the file already. Files in a folder that the user named (`read_given`)
may come from a mount: there links are followed, and another user may own a file and its group read it. Knows
no keys and no formats.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from w5xde.errors import StorageError
from w5xde.runs import STATE_VARIABLE
from w5xde.runtime.system.file_lock import try_lock

HAS_MODES = os.name == "posix"
# Several times a register with as many tickets and nodes as it may have.
BYTES_MAX = 32 * 1024 * 1024
# A change takes milliseconds; a process that holds a lock longer was stopped, and must not stop this one too.
LOCK_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.01
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this user's keys and credentials; run folders are copied and shared."""
    if named := environ.get(STATE_VARIABLE):
        return Path(named).expanduser()
    base = environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that a relative path must be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local/state") / "w5xde"


def make_folder(base: Path, *names: str) -> Path:
    """Make a folder below the base, and all between them, for their owner alone; returns it."""
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
        raise _storage_error(folder, error) from error
    return folder


def read(file: Path) -> bytes:
    """Return a private file. Raises FileNotFoundError, or StorageError if others can read it."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | _NO_FOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _storage_error(file, error) from error
    # Check the open file: the name may mean another one by now.
    return _read_checked(handle, file, lambda found: _check(found, file, is_folder=False))


def read_given(file: Path) -> bytes:
    """Return a private file in a folder that the user named. Raises FileNotFoundError, or StorageError.

    It may be a link, read-only and another user's, as mounted secrets are. Nobody but its owner and its group
    may read it, and nobody but its owner may write it.
    """
    try:
        # A pipe must not be waited for.
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _given_error(file, error) from error
    return _read_checked(handle, file, lambda found: _check_given(found, file))


def _read_checked(handle: int, file: Path, check: Callable[[os.stat_result], None]) -> bytes:
    try:
        check(os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb") as opened:
        data = opened.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise StorageError(f"{file} is larger than anything we write", code="W5-411", fix="look what it is")
    return data


def create(file: Path, data: bytes) -> bool:
    """Write a file that is not there, whole or not at all, and sync it; returns False if it is there.

    Makes its folder if that is missing. OSError is left to the caller. Needs no lock.
    """
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(mode=0o700, parents=True)
    aside = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(handle)
        try:
            # Unlike renaming, linking replaces nothing.
            os.link(aside, file)
        except OSError as error:
            # Some file systems have no links.
            if error.errno == errno.EEXIST or file.exists():
                return False
            aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(file.parent)
    return True


def replace(file: Path, data: bytes) -> None:
    """Write a file, or replace it, whole or not at all, and sync it.

    Callers hold the lock that belongs to the file, so that only one process writes it.
    """
    aside = file.with_name(f".{file.name}.new")
    try:
        # Left by a process that was killed while writing.
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
        raise _storage_error(file, error) from error


def remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
        sync_folder(file.parent)
    except OSError as error:
        raise _storage_error(file, error) from error


def sync_folder(folder: Path) -> None:
    if not HAS_MODES:
        return  # Windows writes names by itself, and cannot open folders
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(file: Path, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock file. Raises StorageError if another process holds it for longer than this."""
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
    """Lock a file until the returned handle is closed or this process ends; None: another process has it."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _NO_FOLLOW, 0o600)
    except OSError as error:
        raise _storage_error(file, error) from error
    deadline = time.monotonic() + seconds
    while not try_lock(handle):
        if time.monotonic() >= deadline:
            os.close(handle)
            return None
        time.sleep(_LOCK_POLL_SECONDS)
    return handle


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


def _check_given(found: os.stat_result, file: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"{file} is not a file", code="W5-410", fix="move it away")
    mode = stat.S_IMODE(found.st_mode)
    if HAS_MODES and mode & 0o027:
        raise StorageError(
            f"{file} is open to others (mode {mode:04o})",
            code="W5-410",
            why="anybody who has read it can pass for this coordinator",
            fix=f"chmod 600 {file} , for a Kubernetes Secret defaultMode: 0440; if others may have read it,"
            " make a new identity in another folder",
        )


def _given_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be used: {error.strerror or error}",
        code="W5-411",
        fix="mend its permissions, or name another folder with --identity",
    )


def _storage_error(path: Path, error: OSError) -> StorageError:
    if error.errno == errno.ELOOP:
        return StorageError(f"{path} is a link", code="W5-410", fix="put the file itself there")
    return StorageError(
        f"{path} cannot be used: {error.strerror or error}",
        code="W5-411",
        fix="make room or mend its permissions, or name another folder with W5XDE_STATE",
    )
