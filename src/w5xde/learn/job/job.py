"""The job: what to train, as functions of the user's. Finds jobs by name, and describes their errors.

Imports torch only to execute a job file, so that a wrong name is refused at once. Knows nothing of how a job
is trained.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from w5xde.callbacks import Callback
from w5xde.errors import JobError, W5xdeError
from w5xde.sanitize import harmless

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


# The job file, or module, whose code is being executed to find its job; empty: none is.
_loading: ContextVar[str] = ContextVar("loading", default="")
# Where Python's own modules are.
_STANDARD = sysconfig.get_path("stdlib")
# Enough for the text of any common exception; a tensor in it may be much longer.
DESCRIPTION_CHARACTERS_MAX = 500

# What the parts of a job look like that are no functions without arguments.
_FORMS = {
    "loss": "lambda model, batch: …",
    "optimizer": "lambda params: …",
    "scheduler": "lambda optimizer: …",
    "evaluate": "lambda model: …",
    "collate": "lambda samples: …",
    "sampler": "lambda data, epoch, seed: …",
    "weight": "lambda batch: …",
    "settings": "lambda: {…}",
    "callbacks": "lambda: […]",
    "measure": "lambda model, batch: …",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train. Every machine of a run builds it from the same file.

    model()            returns the module to train
    data()             returns a map-style or iterable data set, or a DataLoader, of which the parts are used
    loss(model, batch) returns a scalar; batch is what torch's default_collate makes of the samples
    optimizer(params)  returns the optimizer; params has named_parameters() too, for groups, the model as
                       params.module, and the length of the run as params.run
    scheduler(opt)     returns a learning-rate schedule, stepped once for each optimizer step; or None
    evaluate(model)    returns a dict of numbers (or one number), measured at the coordinator
    validation()       returns a map-style data set, or a DataLoader of one, whose batches nodes measure; in
                       place of evaluate
    measure(model, batch) returns a dict of numbers (or one number): means over the samples of a batch of it
    collate(samples)   returns the batch of a list of samples, for example padded
    sampler            a torch Sampler, or a function of (data set, epoch, seed): the samples of an epoch by
                       number, in order; or lists of numbers, each of which is a batch
    weight(batch)      returns what a batch counts in its step, for example its tokens (default: its samples)
    settings           defaults of this job, as a dict or a function that returns one: {"batch_size": 8}
    callbacks()        returns the callbacks of this job, for its coordinator
    """

    model: Callable[[], Module]
    data: Callable[[], Any]
    loss: Callable[[Module, Any], Tensor]
    optimizer: Callable[[Any], Optimizer]
    scheduler: Callable[[Optimizer], Any] | None = None
    evaluate: Callable[[Module], Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[Any] | Callable[[Any, int, int], Any] | None = None
    weight: Callable[[Any], Any] | None = None
    settings: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    callbacks: Callable[[], Iterable[Callback]] | None = None
    validation: Callable[[], Any] | None = None
    measure: Callable[[Module, Any], Any] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_sampler = field.name == "sampler" and hasattr(value, "__iter__")
            is_plain = is_sampler or (field.name == "settings" and isinstance(value, Mapping))
            if not (callable(value) or is_plain or (value is None and field.default is None)):
                raise JobError(
                    f"Job({field.name}=…) is {type(value).__name__}, not a function",
                    code="W5-202",
                    fix=f"pass a function: Job({field.name}={_FORMS.get(field.name, 'lambda: …')})",
                )
        if not isinstance(self.model, type) and hasattr(self.model, "state_dict"):
            kind = type(self.model).__name__
            raise JobError(
                f"Job(model=…) is a {kind} itself, not a function that makes one",
                code="W5-202",
                why="every process of a run makes its own model",
                fix=f"pass a function: Job(model=lambda: {kind}(…))",
            )
        if (self.validation is None) != (self.measure is None):
            one, other = ("validation", "measure") if self.measure is None else ("measure", "validation")
            raise JobError(
                f"Job({one}=…) needs {other}=… too",
                code="W5-266",
                fix="give both: validation=lambda: data_set, measure=lambda model, batch: {'loss': …}",
            )
        if self.evaluate is not None and self.validation is not None:
            raise JobError(
                "Job(evaluate=…) and Job(validation=…) are two ways to evaluate",
                code="W5-266",
                fix="use one of them: nodes compute what validation= and measure= say, and evaluate= runs at"
                " the coordinator",
            )


def own_settings(job: Job) -> dict[str, Any]:
    """The settings that a job brings along: defaults for whoever trains it."""
    found = call("settings()", job.settings) if callable(job.settings) else job.settings or {}
    if not isinstance(found, Mapping):
        raise JobError(
            f"settings() returned a {type(found).__name__}",
            code="W5-202",
            fix='return a dict, for example {"batch_size": 8, "epochs": 3}',
        )
    return dict(found)


class JobHolder:
    """An object that stands for a job in its file: `w5xde.Pool`."""

    job: Job


def load_job(reference: str) -> Job:
    """The job that `train.py`, `train.py:name` or `package.module:name` names, or that of a pool there."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        place, name = reference, ""
    module = _load_file(place) if place.endswith(".py") or "/" in place else _load_module(place, reference)
    held = {key: value.job if isinstance(value, JobHolder) else value for key, value in vars(module).items()}
    jobs = {key: value for key, value in held.items() if isinstance(value, Job)}
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
    """Run the code of a job file; what it raises becomes a JobError, and errors of ours name its line."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    # A loop of torch, or a framework's, that is no call of ours.
    watch = register_optimizer_step_pre_hook(
        lambda optimizer, *_: refuse_while_loading(f"{type(optimizer).__name__}.step")
    )
    token = _loading.set(place)
    try:
        load()
    except W5xdeError as error:
        line = _users_line(error)
        if not line:
            raise
        told = type(error)(f"{error.what} ({line})", code=error.code, why=error.why, fix=error.fix)
        raise told.with_traceback(error.__traceback__) from error.__cause__
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{place} cannot be loaded: {describe(error)}",
            code="W5-208",
            fix="run it with python to see more; training belongs under  if __name__ == '__main__':",
        ) from error
    finally:
        watch.remove()
        _loading.reset(token)


def refuse_while_loading(what: str) -> None:
    """Raise JobError if a job file is being executed to find its job: it must not start `what` then."""
    place = _loading.get()
    if place:
        raise JobError(
            f"{place} calls {what}() at its top level, so it would train while it is being loaded",
            code="W5-242",
            why="every command and every node executes the whole file to find its job",
            fix='put that under  if __name__ == "__main__":  (the job, or the pool, stays outside)',
        )


def call(what: str, function: Callable[..., Any], *arguments: Any, code: str = "W5-202") -> Any:
    """Call a function of the user's, which messages call `what`; what it raises becomes a JobError.

    Errors of ours stay as they are.
    """
    try:
        return function(*arguments)
    except W5xdeError:
        raise
    except Exception as error:
        raise JobError(f"{what} failed: {describe(error)}", code=code) from error


class BatchFailed(Exception):
    """A batch could not be computed here; the text says why."""


def describe(error: BaseException) -> str:
    """An exception in one line, with the last line of the user's code that it passed through."""
    text = " ".join(harmless(str(error)).split())
    if len(text) > DESCRIPTION_CHARACTERS_MAX:
        text = text[:DESCRIPTION_CHARACTERS_MAX] + " …"
    named = f"{type(error).__name__}: {text}" if text else type(error).__name__
    line = _users_line(error)
    return f"{named} ({line})" if line else named


def _users_line(error: BaseException) -> str:
    """The file and the last line of the user's code that an exception passed through; empty if none."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""


def _is_users(filename: str) -> bool:
    parts = Path(filename).parts
    ours = str(Path(__file__).resolve().parents[2])
    inside = filename.startswith(("<", ours, _STANDARD)) or {"site-packages", "torch"} & set(parts)
    return not inside
