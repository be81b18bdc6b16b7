"""The fast path for small batches: replays a recording of them, in groups if a node has several.

`FastPath.compute` is its only method, and its results have the bits of batches computed plainly. To that end
the fast path times and records one batch of each shape, compares the first results with batches computed
plainly, and later ones ever more rarely; a shape that once differs is computed plainly from then on. Knows no
seeds, no backward pass and no buffers: the trainer passes in how a batch is computed plainly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from w5xde.learn.job.job import BatchFailed
from w5xde.learn.model.device import to_device
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.torch_private import NotRecordable, scale_of
from w5xde.learn.train.batch import BatchGradient, BatchId, WeightedBatch
from w5xde.learn.train.position import reads
from w5xde.learn.train.recording.record import Recording
from w5xde.learn.train.recording.replay import Replay
from w5xde.learn.train.vectors import BLOCK_ROWS, GradientVectors
from w5xde.messages import MOVING, Rules

# A batch that takes longer spends its time in the kernels; the first few may take long because they warm up.
SMALL_SECONDS = 0.005
TIMED_MAX = 8
# If more shapes than this occur, further ones are not recorded.
SHAPES_MAX = 16
# The results of a group must stay close to a core.
GROUP_BYTES_MAX = 4 * 1024 * 1024

CHANGED = (
    "the loss is no longer the function of model and batch that it was: some batches since may be wrong. Use"
    " --recording off, or keep what changes in a buffer"
)


class FastPath:
    """Computes the gradients of small batches in less time than forward and backward take."""

    def __init__(
        self,
        flat: FlatModel,
        rules: Rules,
        vectors: GradientVectors,
        backward: Callable[[WeightedBatch, Any], Tensor],
        compute_plainly: Callable[[WeightedBatch], BatchGradient],
    ) -> None:
        """`backward(batch, value)` gives the loss and leaves gradients in the parameters; it is recorded."""
        self._vectors = vectors
        self._backward = backward
        self._compute_plainly = compute_plainly
        blueprint = flat.blueprint
        self._device = flat.state.device
        self._parameters = [flat.tensors[entry] for entry in blueprint.trained]
        self._steady = [*flat.module.parameters(), *flat.module.buffers()]
        self._is_allowed = (
            rules.recording == "auto"
            and self._device.type == "cpu"
            # A recording is compared with a batch computed plainly, on the same parameters.
            and not flat.is_view
            and not rules.seeds_python
            and not rules.seeds_numpy
            and not any(group.role == MOVING for group in blueprint.moving_groups)
        )
        self._shapes: dict[Any, _Shape] = {}

    def compute(self, batches: Sequence[WeightedBatch]) -> dict[BatchId, BatchGradient]:
        """The gradients of those batches that have a fast path; the caller computes the others plainly.

        Of several batches only those that can be computed in groups: a batch that fails then fails alone.
        """
        alike: dict[tuple[_Shape, float], list[WeightedBatch]] = {}
        for batch in batches if self._is_allowed else ():
            shape = self._shape_of(batch.value)
            if shape is not None:
                alike.setdefault((shape, batch.weight), []).append(batch)
        found: dict[BatchId, BatchGradient] = {}
        for (shape, _), several in alike.items():
            if len(batches) == 1:
                return self._compute_one(shape, several[0])
            start = 0
            while start + 1 < len(several) and (group := shape.find_group()) is not None:
                found |= self._replay(shape, group, several[start : start + group.size])
                start += group.size
        return found

    def _shape_of(self, value: Any) -> _Shape | None:
        """The shape of a batch; None if batches of this shape are computed plainly."""
        key: list[Any] = [type(value), *value] if type(value) is dict else [type(value)]
        for each in _tensors_of(value):
            if type(each) is not Tensor or each.requires_grad or not each.is_contiguous():
                return None
            key += [each.shape, each.stride(), each.dtype]
        shape = self._shapes.get(tuple(key))
        if shape is None:
            if len(self._shapes) == SHAPES_MAX:
                return None
            shape = self._shapes[tuple(key)] = _Shape()
        return None if shape.is_plain else shape

    def _compute_one(self, shape: _Shape, batch: WeightedBatch) -> dict[BatchId, BatchGradient]:
        if shape.single is None and not shape.is_small:
            started = time.perf_counter()
            found = {batch.id: self._compute_plainly(batch)}
            shape.add_time(time.perf_counter() - started)
            return found
        if shape.single is None:
            try:
                shape.single = Replay(self._record(batch), 1)
            except NotRecordable:
                shape.is_plain = True
                return {}
        found = self._replay(shape, shape.single, [batch])
        if shape.has_changed:
            shape.has_changed = False
            raise BatchFailed(CHANGED)
        return found

    def _record(self, batch: WeightedBatch) -> Recording:
        value = to_device(batch.value, self._device)
        inputs = [*_tensors_of(value), scale_of(batch.weight)]
        before = reads()
        recording = Recording(inputs, self._steady, self._parameters, lambda: self._backward(batch, value))
        if reads() != before:
            raise NotRecordable("the loss asks which step and batch it is computed for")
        return recording

    def _replay(
        self, shape: _Shape, replay: Replay, batches: list[WeightedBatch]
    ) -> dict[BatchId, BatchGradient]:
        """The gradients of batches of one shape and weight; nothing if the replay turns out to be wrong."""
        try:
            inputs = [_tensors_of(batch.value) for batch in batches]
            losses, rows = replay.run(inputs, scale_of(batches[0].weight))
        except Exception:
            # The recording does not fit these batches, or one of them is wrong: computed plainly, that one
            # raises.
            shape.discard(replay)
            return {}
        vectors, absent = self._vectors.join(rows, len(batches)), replay.recording.absent
        found = {
            batch.id: BatchGradient(vector, loss, absent)
            for batch, vector, loss in zip(batches, vectors, losses, strict=False)
        }
        for place in replay.compare_next(len(batches)):
            batch = batches[place]
            try:
                plain = self._compute_plainly(batch)
            except (Exception, SystemExit):
                shape.discard(replay)
                return {}
            if not found[batch.id].is_same(plain):
                shape.discard(replay)
                shape.has_changed |= replay.is_trusted(place)
                return {batch.id: plain}
            self._vectors.recycle(plain.vector)
        return found


class _Shape:
    """Batches of one shape, and how they are computed."""

    def __init__(self) -> None:
        self.single: Replay | None = None
        # All batches of this shape are computed plainly.
        self.is_plain = False
        # A replay differed after its results were used without comparison.
        self.has_changed = False
        self._timed = 0
        self._seconds = math.inf
        self._group: Replay | None = None
        self._has_no_group = False

    @property
    def is_small(self) -> bool:
        return self._seconds <= SMALL_SECONDS

    def add_time(self, seconds: float) -> None:
        """A batch took this long, computed plainly."""
        self._seconds = seconds
        self._timed += 1
        self.is_plain = not self.is_small and self._timed == TIMED_MAX

    def find_group(self) -> Replay | None:
        """The replay for several batches, once the replay for one has passed its first comparisons."""
        if self.single is None or not self.single.is_compared or self._has_no_group:
            return None
        if self._group is None:
            self._group = _make_group(self.single)
            self._has_no_group = self._group is None
        return self._group

    def discard(self, replay: Replay) -> None:
        self._group, self._has_no_group = None, True
        if replay is self.single:
            self.single, self.is_plain = None, True


def _make_group(single: Replay) -> Replay | None:
    """A replay of several batches that has the bits of this one; None if batches are large or bits differ."""
    size = min(BLOCK_ROWS, GROUP_BYTES_MAX // max(1, single.recording.result_bytes))
    try:
        group = Replay(single.recording, size)
        return group if size > 1 and group.agrees_with(single) else None
    except Exception:
        # A kernel does not work on several batches: each batch is computed alone.
        return None


def _tensors_of(value: Any) -> list[Any]:
    """The members of a batch; tensors, if it can be recorded."""
    if type(value) in (tuple, list):
        return list(value)
    return list(value.values()) if type(value) is dict else [value]
