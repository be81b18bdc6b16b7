"""The workbench: what a node does with parameters and work, and how its answers are encoded.

Everything here runs where the trainer does: on the node's loop if it is quick, else on a thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from w5xde.compression import NONE
from w5xde.control.choice import CodecChoice
from w5xde.errors import RemoteProtocolError, W5xdeError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.sender import CodecSender, goes_as_it_is
from w5xde.learn.enrol import NodeParts
from w5xde.learn.layout import Vector
from w5xde.learn.payload import Unpacker
from w5xde.learn.trainer import BatchFailed, Task
from w5xde.messages import Answer, Loan, Params, Work
from w5xde.protocol.wire import Body
from w5xde.runtime.buffers import POOLED_BYTES_MIN
from w5xde.tree import Span, batch_seed


@dataclass(slots=True)
class Done:
    """The answers to one Work, their vectors as they travel, and what it took."""

    answers: list[Answer]
    pieces: list[memoryview]
    # Vectors that `pieces` are views of: not to be used again before those are sent.
    lent: list[Vector]
    compute_seconds: float
    core_seconds: float


class Workbench:
    """One node's model and data at work. `is_cancelled` tells which leases nobody needs any more."""

    def __init__(
        self, parts: NodeParts, clock: Callable[[], float], is_cancelled: Callable[[int], bool]
    ) -> None:
        self.parts = parts
        self._clock = clock
        self._is_cancelled = is_cancelled
        self._blueprint = parts.trainer.blueprint
        self._choice = CodecChoice()
        setting = parts.welcome.rules.compress
        self._sender: CodecSender | None = None
        if not goes_as_it_is(setting, self._blueprint.moving_bytes):
            self._sender = CodecSender(setting, "up", self._blueprint.moving_groups, self._choice, clock)
        # The model's own memory, while parameters are being received into it.
        self._placed: Body | None = None
        # Encoding and decoding, since somebody last asked.
        self._codec_seconds = 0.0

    def take_codec_seconds(self) -> float:
        seconds, self._codec_seconds = self._codec_seconds, 0.0
        return seconds

    def place(self, params: Params, count: int) -> Body | None:
        """Where parameters may be received to if nothing is being computed: the model itself."""
        self._placed = None
        if params.codec == NONE and count >= POOLED_BYTES_MIN:
            self._placed = self.parts.trainer.memory(count, whole=params.whole)
        return self._placed

    def load(self, params: Params, body: Body) -> None:
        """Take over a version of the parameters."""
        if params.codec == NONE:
            self.parts.trainer.load(body, whole=params.whole, in_place=body is self._placed)
            self._placed = None
            return
        begun = self._clock()
        groups = self._blueprint.groups if params.whole else self._blueprint.moving_groups
        count = self._blueprint.whole_bytes if params.whole else self._blueprint.moving_bytes
        pipeline = parse(params.codec)
        # Straight into the model, where others can write it: nothing is being computed now.
        memory = self.parts.trainer.memory(count, whole=params.whole)
        raw = memory if memory is not None else bytearray(count)
        if count:
            pipeline.decode(body, torch.frombuffer(raw, dtype=torch.uint8), groups)
        self._codec_seconds += self._clock() - begun
        self.parts.trainer.load(raw, whole=params.whole, in_place=memory is not None)

    def compute(self, work: Work, body: Body) -> Done:
        """Compute every loan that is still needed."""
        if 0 < work.link < math.inf:
            self._choice.link(work.link)
        done = Done([], [], [], 0.0, 0.0)
        on_core = time.process_time()
        unpacker = Unpacker(body)
        for loan in work.loans:
            begun = self._clock()
            answer, vector = self._compute(loan, unpacker)
            done.compute_seconds += answer.seconds
            if vector is not None:
                answer = self._pack(answer, vector, done, begun)
            done.answers.append(answer)
        done.core_seconds = time.process_time() - on_core
        return done

    def _compute(self, loan: Loan, unpacker: Unpacker) -> tuple[Answer, Vector | None]:
        if self._is_cancelled(loan.lease):
            return Answer(loan.lease, dropped=True), None
        parts = self.parts
        begun = self._clock()
        try:
            batches = []
            for batch in loan.batches:
                value: Any = unpacker.unpack(batch.item, batch.at)
                if parts.source is not None:
                    seed = batch_seed(parts.welcome.rules.seed, loan.epoch, batch.index)
                    _require_indices(value, batch.samples, parts.source.samples)
                    value = parts.source.read_indices(value, seed)
                batches.append((batch.index, batch.samples, value))
            span = Span(loan.start, loan.stop)
            outcome = parts.trainer.compute(Task(loan.epoch, span, loan.count, loan.samples, batches))
        except (BatchFailed, W5xdeError) as error:
            return Answer(loan.lease, seconds=self._clock() - begun, failure=str(error)[:2000]), None
        seconds = self._clock() - begun
        answer = Answer(loan.lease, loss_sum=outcome.loss_sum, seconds=seconds, absent=outcome.absent)
        return answer, outcome.vector

    def _pack(self, answer: Answer, vector: Vector, done: Done, now: float) -> Answer:
        raw = vector.raw.cpu()
        if self._sender is None:
            done.pieces.append(raw.numpy().data)
            done.lent.append(vector)
            return answer
        encoded = self._sender.encode(raw, now)
        self._codec_seconds += encoded.seconds
        done.pieces += encoded.pieces
        if encoded.spec == NONE:
            done.lent.append(vector)
            return answer
        self.parts.trainer.recycle(vector)
        return Answer(
            answer.lease,
            answer.loss_sum,
            answer.seconds,
            answer.absent,
            codec=encoded.spec,
            body_bytes=encoded.encoded_bytes,
        )


def _require_indices(value: Any, count: int, samples: int) -> None:
    """Refuse what does not name so many samples of our own data."""
    is_list = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == (count,)
    if not is_list or int(value.min()) < 0 or int(value.max()) >= samples:
        raise RemoteProtocolError(f"a batch that does not name {count} of our samples", code="W5-120")
