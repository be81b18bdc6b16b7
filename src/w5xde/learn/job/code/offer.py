"""What a coordinator tells nodes about its job: the code that it sends to those that ask, and its versions.

Collects the job file and the modules that `--ship` names, which lie beside it. Only files that the user named
are read, and links are not followed. Knows no sockets: others decide who is sent the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from w5xde.errors import UsageError
from w5xde.learn.job.code.bundle import BadCode, CodeBundle
from w5xde.learn.job.code.packages import imported_modules, packages_of, versions_of
from w5xde.learn.job.named_job import NamedJob
from w5xde.message_types import CODE_BYTES_MAX, CODE_FILES_MAX, PACKAGES_MAX
from w5xde.messages import Offer

CODE = "W5-287"
OFF = "off"


@dataclass(frozen=True, slots=True)
class JobOffer:
    """The code of a run's job, or why there is none to send; and the versions that the run uses."""

    code: CodeBundle | None = None
    reason: str = "it has none"
    versions: dict[str, str] = field(default_factory=dict)
    # Modules that the code imports and that are not part of it, each with its package, empty if it has none.
    imports: dict[str, str] = field(default_factory=dict)
    # Files and folders beside the job file that the code imports and that are not part of it.
    left_behind: tuple[str, ...] = ()
    # Whether each node reads its own copy of the data.
    reads_data: bool = False

    @property
    def sha256(self) -> str:
        return self.code.sha256 if self.code is not None else ""

    def message(self) -> Offer:
        """The offer to a node; its body is that of the code."""
        if self.code is None:
            raise ValueError("there is no code to offer")
        return Offer(
            self.code.job,
            self.code.sizes,
            self.sha256,
            imports=self.imports,
            versions=self.versions,
            reads_data=self.reads_data,
        )


def offer_of(named: NamedJob, ship: str | None, *, reads_data: bool) -> JobOffer:
    """Collect what is offered; UsageError if `ship` names something that cannot be sent.

    A job file that cannot be sent is no error: its nodes need a copy, as ever.
    """
    code, reason = _collect(named, ship)
    sources = list(code.files.values()) if code is not None else named.sources
    modules = imported_modules(sources)
    # Modules beside the job file are the user's own, also if a package has the same name.
    beside = _beside(named.file.resolve().parent, modules) if named.file is not None else {}
    own = [module for module in modules if module in beside and not _is_part(module, code)]
    found = packages_of(module for module in modules if module not in beside)
    imports = list({**dict.fromkeys(own, ""), **found}.items())
    return JobOffer(
        code,
        reason,
        versions_of(filter(None, found.values())),
        dict(imports[:PACKAGES_MAX]),
        tuple(beside[module] for module in own) if code is not None else (),
        reads_data,
    )


def _collect(named: NamedJob, ship: str | None) -> tuple[CodeBundle | None, str]:
    if ship == OFF:
        return None, f"it was started with --ship {OFF}"
    if named.file is None:
        if ship is not None:
            raise _refused(
                f"the job {named.reference} is not a file, so there is nothing to send with it",
                "start the run with the job's file:  w5xde serve train.py",
            )
        return None, f"its job, {named.reference}, is not a file that could be sent"
    try:
        return collect_code(named.file, named.job_name, ship), ""
    except OSError as error:
        # A node must not learn where the files lie.
        trouble = f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"
    except BadCode as error:
        trouble = str(error)
    if ship is not None:
        raise _refused(
            f"the code of this job cannot be sent to nodes: {trouble}",
            f"mend that, ship less, or send nothing with --ship {OFF} and copy the files yourself",
        )
    return None, f"its job file cannot be sent: {trouble}"


def collect_code(file: Path, job_name: str, ship: str | None) -> CodeBundle:
    """The job file, and the modules beside it that `ship` names. Raises OSError, BadCode, or UsageError."""
    folder = file.resolve().parent
    files = {file.name: file.read_bytes()}
    for said in (ship or "").split(","):
        for path in _named_files(said.strip(), folder):
            files[path.relative_to(folder).as_posix()] = _read(path)
            if len(files) > CODE_FILES_MAX or sum(map(len, files.values())) > CODE_BYTES_MAX:
                break  # whatever follows, it is too much
    return CodeBundle.of(f"{file.name}{job_name}", files)


def left_behind(file: Path, code: CodeBundle) -> list[str]:
    """Files and folders beside the job file that the code imports and that are not part of it."""
    beside = _beside(file.resolve().parent, imported_modules(list(code.files.values())))
    return [name for module, name in beside.items() if not _is_part(module, code)]


def _named_files(said: str, folder: Path) -> Iterator[Path]:
    """The Python files that one word of `--ship` names, seen from the job file or from here."""
    if not said:
        return
    path = next((found for found in (folder / said, Path(said).absolute()) if found.exists()), None)
    if path is None:
        raise _refused(f"--ship {said}: there is no such file or folder", "name it as seen from the job file")
    if path.is_symlink():
        raise BadCode(f"{said} is a link")
    # Without links and dots on the way, so that a name says where the file is.
    path = path.resolve()
    if not path.is_relative_to(folder):
        raise _refused(
            f"--ship {said} is not a file or folder beside the job file, in {folder}",
            "imports find what lies beside the job file: put it there, or install it as a package on nodes",
        )
    if path.is_file() and path.suffix != ".py":
        raise BadCode(f"{said} is not a Python file; data is not sent with the code")
    yield from _python_files(path)


def _python_files(path: Path) -> Iterator[Path]:
    """The file itself, or all Python files below a folder, without hidden ones."""
    if path.is_symlink():
        raise BadCode(f"{path} is a link")
    if path.is_dir():
        for each in sorted(path.iterdir()):
            if not each.name.startswith((".", "__pycache__")):
                yield from _python_files(each)
    elif path.suffix == ".py":
        yield path


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(CODE_BYTES_MAX + 1)


def _beside(folder: Path, modules: list[str]) -> dict[str, str]:
    """Those of the modules that lie in a folder, and the names of their files or folders."""
    files = {module: f"{module}.py" for module in modules if (folder / f"{module}.py").is_file()}
    return files | {module: module for module in modules if any((folder / module).glob("*.py"))}


def _is_part(module: str, code: CodeBundle | None) -> bool:
    names = code.files if code is not None else {}
    return any(name == f"{module}.py" or name.startswith(f"{module}/") for name in names)


def _refused(what: str, fix: str) -> UsageError:
    return UsageError(what, code=CODE, fix=fix)
