"""Loaded by every Python program that `tests/deploy/contained.py` starts.

Stands in for the resolver of a cluster, and for a root file system that cannot be written. It sees what
Python opens, makes and removes, and not what a library does in C.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any

_HOSTS = dict(each.split("=") for each in os.environ.get("TEST_HOSTS", "").split(",") if each)
# Of the kernel, and not of the root file system.
_WRITABLE = ("/dev/", "/proc/", *filter(None, os.environ.get("TEST_WRITABLE", "/").split(":")))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events with a path, and where they have the descriptor of the folder that it is seen from.
_CHANGES = {"os.mkdir": [(0, 2)], "os.remove": [(0, 1)], "os.rmdir": [(0, 1)], "os.rename": [(0, 2), (1, 3)]}
_CHANGES |= {"os.symlink": [(1, 2)], "os.link": [(1, 3)], "os.chmod": [(0, 2)]}
_look_up = socket.getaddrinfo


def _with_hosts(host: Any, *more: Any, **others: Any) -> Any:
    return _look_up(_HOSTS.get(host, host), *more, **others)


def _refuse(path: object, folder: int = -1) -> None:
    if isinstance(path, (str, bytes)):
        # Without pathlib: a hook is called for everything, and before anything is imported.
        base = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""  # noqa: PTH115
        full = os.path.realpath(os.path.join(base, os.fsdecode(path)))  # noqa: PTH118
        if not f"{full}/".startswith(_WRITABLE):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), full)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
        _refuse(args[0])
    for path, folder in _CHANGES.get(event, ()):
        _refuse(args[path], args[folder])


socket.getaddrinfo = _with_hosts
sys.addaudithook(_watch)
