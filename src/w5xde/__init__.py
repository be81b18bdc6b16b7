"""WIIIIIDE: train one PyTorch model on every machine you have.

Only the public names. Each is loaded on first use, so that `w5xde --help` is instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w5xde.api import join, serve, train
    from w5xde.callbacks import Callback
    from w5xde.callbacks.evaluation import Evaluation
    from w5xde.callbacks.ready import EarlyStopping, LearningRateMonitor, SaveBest
    from w5xde.callbacks.status import NodeReport, RunStatus
    from w5xde.callbacks.weights import Weights
    from w5xde.errors import JobError, JoinError, StorageError, TrainingError, UsageError, W5xdeError
    from w5xde.frameworks.hugging_face import from_trainer
    from w5xde.frameworks.lightning import from_lightning
    from w5xde.learn.job.job import Job
    from w5xde.learn.train.position import Position, current
    from w5xde.pool.pool import Pool
    from w5xde.runtime.telemetry.result import Result

__version__ = "0.1.0"

_HOMES = {
    "Job": "w5xde.learn.job.job",
    "Pool": "w5xde.pool.pool",
    "train": "w5xde.api",
    "serve": "w5xde.api",
    "join": "w5xde.api",
    "Result": "w5xde.runtime.telemetry.result",
    "current": "w5xde.learn.train.position",
    "Position": "w5xde.learn.train.position",
    "Callback": "w5xde.callbacks",
    "from_lightning": "w5xde.frameworks.lightning",
    "from_trainer": "w5xde.frameworks.hugging_face",
    "EarlyStopping": "w5xde.callbacks.ready",
    "SaveBest": "w5xde.callbacks.ready",
    "LearningRateMonitor": "w5xde.callbacks.ready",
    "Evaluation": "w5xde.callbacks.evaluation",
    "Weights": "w5xde.callbacks.weights",
    "NodeReport": "w5xde.callbacks.status",
    "RunStatus": "w5xde.callbacks.status",
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
    "EarlyStopping",
    "Evaluation",
    "Job",
    "JobError",
    "JoinError",
    "LearningRateMonitor",
    "NodeReport",
    "Pool",
    "Position",
    "Result",
    "RunStatus",
    "SaveBest",
    "StorageError",
    "TrainingError",
    "UsageError",
    "W5xdeError",
    "Weights",
    "__version__",
    "current",
    "datasets",
    "from_lightning",
    "from_trainer",
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
