"""The code of a job as it travels: Python files by their names, what they may be, and one hash for all.

Whoever agrees to run a bundle agrees to its hash, so the hash covers the name and content of every file, and
which job is run. What a person reads must be what Python runs: names that two systems could take for the same
file, and files in other encodings than UTF-8, are refused. Coordinator and node apply the same rules. Knows
no disk and no sockets, and runs nothing.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from w5xde.errors import RemoteProtocolError
from w5xde.message_types import (
    CODE_BYTES_MAX,
    CODE_FILES_MAX,
    CODE_NAME_PATTERN,
    CODE_REFERENCE_PATTERN,
    NAME_CHARACTERS_MAX,
)
from w5xde.messages import Offer

# The first line of what is hashed. Another form of it gets another number.
_FORM = "w5xde code 1"
# Modules that a bundle must not replace: everything here would import those of the bundle instead.
_TAKEN = sys.stdlib_module_names | {"w5xde", "torch", "numpy"}
# As Python itself ends lines, and finds the encoding of a file (PEP 263).
_LINE_END = re.compile(rb"\r\n|\r|\n")
_ENCODING = re.compile(rb"coding[:=][ \t]*([-\w.]+)")
_UTF_8 = re.compile(rb"utf-?8(-.*)?")


class BadCode(ValueError):
    """These files cannot be a bundle; the text says why."""


@dataclass(frozen=True, slots=True)
class CodeBundle:
    """Files that were checked, in the order of their names, and the job in one of them."""

    job: str
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, job: str, files: Mapping[str, bytes]) -> CodeBundle:
        """Check the files; raises BadCode."""
        _check_names(job, files)
        for name, content in files.items():
            _check_content(name, content)
        return cls(job, {name: files[name] for name in sorted(files)})

    @classmethod
    def from_offer(cls, offer: Offer, body: bytearray | memoryview) -> CodeBundle:
        """Take the files out of an offer; RemoteProtocolError if they are not as it says, or not allowed."""
        files, at = {}, 0
        for name, size in offer.files.items():
            files[name] = bytes(body[at : at + size])
            at += size
        try:
            if at != len(body):
                raise BadCode(f"{len(body)} bytes came for files of {at} bytes")
            bundle = cls.of(offer.job, files)
            if bundle.sha256 != offer.sha256:
                raise BadCode(f"its sha256 is {bundle.sha256}, not {offer.sha256 or 'none'}")
        except BadCode as error:
            raise RemoteProtocolError(f"code that cannot be taken: {error}", code="W5-120") from None
        return bundle

    @property
    def body(self) -> bytes:
        """All files, one after the other."""
        return b"".join(self.files.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.files.items()}

    @property
    def sha256(self) -> str:
        """The hash of the job's name and, for each file, of a line as `sha256sum` prints it."""
        lines = [_FORM, self.job, *(f"{digest_of(data)}  {name}" for name, data in self.files.items())]
        return digest_of("".join(f"{line}\n" for line in lines).encode())


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_names(job: str, files: Mapping[str, bytes]) -> None:
    if not re.match(CODE_REFERENCE_PATTERN, job):
        raise BadCode(f"{job!r} cannot name a job for others: use ASCII letters, digits, _ and -")
    if job.partition(":")[0] not in files:
        raise BadCode(f"the job file {job} is not among the files")
    if len(files) > CODE_FILES_MAX:
        raise BadCode(f"{len(files)} files, and at most {CODE_FILES_MAX} are sent")
    folded: dict[str, str] = {}
    for name in files:
        if len(name) > NAME_CHARACTERS_MAX or not re.match(CODE_NAME_PATTERN, name):
            raise BadCode(f"{name!r} is not the name of a file that is sent: folders and NAME.py in ASCII")
        top = name.partition("/")[0].removesuffix(".py")
        if top in _TAKEN:
            raise BadCode(f"{name} would take the place of the module {top}: rename it")
        # Some disks do not distinguish these, and one file would replace the other. So with folders.
        for part in _folders_and_name(name):
            if folded.setdefault(part.casefold(), part) != part:
                raise BadCode(f"{part} and {folded[part.casefold()]} are one name on some disks: rename one")
    size = sum(map(len, files.values()))
    if size > CODE_BYTES_MAX:
        raise BadCode(f"{size:,} bytes of code, and at most {CODE_BYTES_MAX:,} are sent")


def _folders_and_name(name: str) -> list[str]:
    """The name of a file, and those of all folders that it lies in: `a/b/c.py` lies in `a/b/` and `a/`."""
    parts = name.split("/")
    return [*("/".join(parts[:count]) + "/" for count in range(1, len(parts))), name]


def _check_content(name: str, content: bytes) -> None:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        raise BadCode(f"{name} is not UTF-8, so what is shown of it could differ from what runs") from None
    if b"\0" in content:
        raise BadCode(f"{name} has a null byte, which Python does not read")
    for line in _LINE_END.split(content, maxsplit=2)[:2]:
        named = _ENCODING.findall(line) if b"#" in line else []
        if not all(_UTF_8.fullmatch(each.lower().replace(b"_", b"-")) for each in named):
            raise BadCode(f"{name} names another encoding than UTF-8: save it as UTF-8")
