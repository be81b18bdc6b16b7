"""A contestant: Ray Train's TorchTrainer, which is DistributedDataParallel over gloo, with its best options.

The same model, data, batch size and optimizer as ours, one thread in each worker, one batch of each worker in
a step. Batches are read once and kept. Checkpoints are written straight to the storage of the run, so that
nothing is copied; after the loss of a worker Ray Train starts all workers again from the newest one.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from w5xde.bench.engines.step_times import StepMoment

# As files in the folder of a run: its task, and the process of each worker, by rank.
TASK, WORKER = "task.json", "worker-{}"
# Looks for dead workers ten times as often as it would, and keeps no statistics.
VARIABLES = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# So many losses of workers are survived; the benchmark causes one.
FAILURES_MAX = 3
GLOO_TIMEOUT_SECONDS = 60
_TENSORS, _STATE = "state.safetensors", "state.json"


class TrainTask(msgspec.Struct, frozen=True):
    """What is trained, by how many workers."""

    # A name in `timed_jobs.JOBS`.
    job: str
    batch_size: int
    workers: int
    # 0: no checkpoints.
    checkpoint_steps: int


def missing() -> str:
    """Why Ray Train cannot be used; empty if it can."""
    try:
        import ray.train.torch  # noqa: F401 - only to see whether it is there
    except ImportError as error:
        return str(error).splitlines()[0]
    return ""


def main() -> None:
    """The driver, in a process of its own: trains the task in this folder."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path.cwd()
    task = msgspec.json.decode((folder / TASK).read_bytes(), type=TrainTask)
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    TorchTrainer(
        train,
        train_loop_config={"task": msgspec.to_builtins(task), "folder": str(folder)},
        torch_config=TorchConfig(backend="gloo", timeout_s=GLOO_TIMEOUT_SECONDS),
        scaling_config=ScalingConfig(num_workers=task.workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="bench",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=FAILURES_MAX),
        ),
    ).fit()
    ray.shutdown()


def train(config: dict[str, Any]) -> None:
    """The loop of one worker."""
    import ray.train

    from w5xde.bench.contestants.ddp import agree, chunk_steps, keep
    from w5xde.bench.engines.timed_jobs import ENOUGH, STEPS

    task, folder = msgspec.convert(config["task"], TrainTask), Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    (folder / WORKER.format(rank)).write_text(str(os.getpid()), encoding="ascii")
    worker = RayTrainWorker(task, rank)
    keep(worker)
    place = folder / STEPS if rank == 0 else Path(os.devnull)
    with place.open("a", encoding="ascii", buffering=1) as file:

        def step() -> None:
            worker.step()
            file.write(StepMoment(worker.steps, time.time(), task.workers).line())

        chunk = chunk_steps(step)
        while agree(not (folder / ENOUGH).exists()):
            for _ in range(chunk):
                step()


class RayTrainWorker:
    """One worker: its model, its optimizer and its batches."""

    def __init__(self, task: TrainTask, rank: int) -> None:
        import ray.train
        from ray.train.torch import prepare_model

        from w5xde.bench.contestants.ddp import DDP_OPTIONS
        from w5xde.bench.jobs import SEED
        from w5xde.learn.job.build import build_model
        from w5xde.learn.model.device import use_threads

        use_threads(1)
        self._task, self._rank = task, rank
        self._job = _job(task)
        self._model = build_model(self._job, SEED)
        self._optimizer = self._job.optimizer(self._model.parameters())
        self.steps = 0
        found = ray.train.get_checkpoint()
        if found is not None:
            self._restore(Path(found.path))
        self._parallel = prepare_model(self._model, parallel_strategy_kwargs=DDP_OPTIONS)
        self._batch = _reader(task)

    def step(self) -> None:
        """Make a step with a batch of each worker, and a checkpoint if it is due."""
        batch = self._batch(self.steps * self._task.workers + self._rank)
        self._job.loss(self._parallel, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        if self._task.checkpoint_steps and self.steps % self._task.checkpoint_steps == 0:
            self._save()

    def _save(self) -> None:
        import ray.train
        from ray.train import Checkpoint, CheckpointUploadMode
        from safetensors.torch import save_file

        from w5xde.learn.step.checkpoint import pack

        checkpoint = None
        if self._rank == 0:
            place = Path(ray.train.get_context().get_storage().experiment_fs_path) / f"step-{self.steps}"
            place.mkdir(parents=True)
            tensors: dict[str, Any] = {}
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            packed = pack({"steps": self.steps, **state}, "the state", tensors)
            save_file(tensors, place / _TENSORS)
            (place / _STATE).write_bytes(msgspec.json.encode(packed))
            checkpoint = Checkpoint(str(place))
        ray.train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def _restore(self, place: Path) -> None:
        from safetensors.torch import load_file

        from w5xde.learn.step.checkpoint import unpack

        packed = msgspec.json.decode((place / _STATE).read_bytes())
        state = unpack(packed, load_file(place / _TENSORS))
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def _job(task: TrainTask) -> Any:
    from w5xde.bench.engines.timed_jobs import JOBS

    return JOBS[task.job]


def _reader(task: TrainTask) -> Callable[[int], Any]:
    """Reads batches by their numbers, each once: the same ones as our runs have."""
    from w5xde.bench.jobs import BATCHES_READ_MAX, SEED
    from w5xde.learn.job.build import build_source

    source: Any = build_source(_job(task), SEED, task.batch_size, shuffle=True)
    batches = -(-source.samples // task.batch_size)

    @functools.cache
    def read(number: int) -> Any:
        return source.read(*divmod(number, batches))

    return lambda number: read(number % BATCHES_READ_MAX)
