"""The job: what to train, as functions of the user's. Finds jobs by name, and describes their errors.

Imports no torch, so that a wrong name is refused at once. Knows nothing of how a job is trained.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from w5xde.errors import JobError, W5xdeError
from w5xde.sanitize import harmless

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


# Enough for the text of any common exception; a tensor in it may be much longer.
DESCRIPTION_CHARACTERS_MAX = 500


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train. Every machine of a run builds it from the same file.

    model()            returns the module to train
    data()             returns a map-style or iterable data set
    loss(model, batch) returns a scalar; batch is what torch's default_collate makes of the samples
    optimizer(params)  returns the optimizer; params has named_parameters() too, for groups
    scheduler(opt)     returns a learning-rate schedule, stepped once for each optimizer step
    evaluate(model)    returns a dict of numbers (or one number), measured at the coordinator
    """

    model: Callable[[], Module]
    data: Callable[[], Any]
    loss: Callable[[Module, Any], Tensor]
    optimizer: Callable[[Any], Optimizer]
    scheduler: Callable[[Optimizer], Any] | None = None
    evaluate: Callable[[Module], Any] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not callable(value) and not (value is None and field.default is None):
                raise JobError(
                    f"Job({field.name}=…) is {type(value).__name__}, not a function",
                    code="W5-202",
                    fix=f"pass a function: Job({field.name}=lambda …: …)",
                )


def load_job(reference: str) -> Job:
    """The job that `train.py`, `train.py:name` or `package.module:name` names."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        place, name = reference, ""
    module = _load_file(place) if place.endswith(".py") or "/" in place else _load_module(place, reference)
    jobs = {key: value for key, value in vars(module).items() if isinstance(value, Job)}
    if name:
        return _named(jobs, name, module, place)
    # One job under two names is still one job.
    if len({id(job) for job in jobs.values()}) == 1:
        return next(iter(jobs.values()))
    if not jobs:
        raise JobError(
            f"there is no Job in {place}",
            code="W5-206",
            fix="write  job = w5xde.Job(model=…, data=…, loss=…, optimizer=…)  at the top level of the file",
        )
    raise JobError(
        f"{place} has {len(jobs)} jobs: {', '.join(sorted(jobs))}",
        code="W5-207",
        fix=f"name one, for example  {place}:{min(jobs)}",
    )


def _named(jobs: dict[str, Job], name: str, module: ModuleType, place: str) -> Job:
    if name in jobs:
        return jobs[name]
    if hasattr(module, name):
        what = f"{name} in {place} is a {type(getattr(module, name)).__name__}, not a w5xde.Job"
    else:
        what = f"there is no {name!r} in {place}"
    near = difflib.get_close_matches(name, jobs, n=1)
    known = (
        f"did you mean {place}:{near[0]} ?" if near else f"jobs there: {', '.join(sorted(jobs)) or 'none'}"
    )
    raise JobError(what, code="W5-206", fix=known)


def _load_file(place: str) -> ModuleType:
    path = Path(place)
    if not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(place, siblings, n=1)
        raise JobError(
            f"there is no job file {place}",
            code="W5-206",
            fix=f"did you mean {near[0]} ?"
            if near
            else "give the path of a Python file that makes a w5xde.Job",
        )
    # The folder of the file comes first, as if Python ran the file, so that its imports work.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise JobError(f"{place} is not a Python file", code="W5-206", fix="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    execute = spec.loader.exec_module
    _execute(place, lambda: execute(module))
    return module


def _load_module(place: str, reference: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    unknown = JobError(
        f"there is no job {reference!r}: neither a file nor a module of that name",
        code="W5-206",
        fix="name a file (train.py), a job in it (train.py:job) or a module (package.module:job)",
    )
    if not all(part.isidentifier() for part in place.split(".")):
        raise unknown
    try:
        _execute(place, lambda: importlib.import_module(place))
    except JobError as error:
        missing = error.__cause__
        # The module itself is missing, or a package that it lies in; not a module that it imports.
        if isinstance(missing, ModuleNotFoundError) and f"{place}.".startswith(f"{missing.name}."):
            raise unknown from None
        raise
    return sys.modules[place]


def _execute(place: str, load: Callable[[], object]) -> None:
    """Run the code of a job file; whatever it raises becomes a JobError."""
    try:
        load()
    except W5xdeError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{place} cannot be loaded: {describe(error)}",
            code="W5-208",
            fix="run it with python to see more; training belongs under  if __name__ == '__main__':",
        ) from error


class BatchFailed(Exception):
    """A batch could not be computed here; the text says why."""


def describe(error: BaseException) -> str:
    """An exception in one line, with the last line of the user's code that it passed through."""
    text = " ".join(harmless(str(error)).split())
    if len(text) > DESCRIPTION_CHARACTERS_MAX:
        text = text[:DESCRIPTION_CHARACTERS_MAX] + " …"
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    own = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{named} ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else named


def _is_users(filename: str) -> bool:
    parts = Path(filename).parts
    ours = str(Path(__file__).resolve().parents[2])
    inside = filename.startswith(("<", ours)) or {"site-packages", "importlib", "torch"} & set(parts)
    return not inside
