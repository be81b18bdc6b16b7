"""WIIIIIDE: train one PyTorch model on every machine you have.

Only the public names. Each is loaded on first use, so that `w5xde --help` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w5xde.api import Result, join, serve, train
    from w5xde.callbacks import Callback
    from w5xde.errors import JobError, JoinError, StorageError, TrainingError, UsageError, W5xdeError
    from w5xde.learn.job.job import Job
    from w5xde.runtime.telemetry.status import RunStatus

__version__ = "0.1.0"

_HOMES = {
    "Job": "w5xde.learn.job.job",
    "train": "w5xde.api",
    "serve": "w5xde.api",
    "join": "w5xde.api",
    "Result": "w5xde.api",
    "Callback": "w5xde.callbacks",
    "RunStatus": "w5xde.runtime.telemetry.status",
    "W5xdeError": "w5xde.errors",
    "UsageError": "w5xde.errors",
    "JobError": "w5xde.errors",
    "JoinError": "w5xde.errors",
    "StorageError": "w5xde.errors",
    "TrainingError": "w5xde.errors",
    "datasets": "w5xde.datasets",
}

__all__ = [
    "Callback",
    "Job",
    "JobError",
    "JoinError",
    "Result",
    "RunStatus",
    "StorageError",
    "TrainingError",
    "UsageError",
    "W5xdeError",
    "__version__",
    "datasets",
    "join",
    "serve",
    "train",
]


def __getattr__(name: str) -> Any:
    import importlib

    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'w5xde' has no attribute {name!r}")
    module = importlib.import_module(home)
    return module if name == "datasets" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
