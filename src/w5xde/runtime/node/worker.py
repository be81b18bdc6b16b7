"""The worker of a node: loads parameters into the model, computes work, and encodes the answers.

Runs where the trainer runs: on the node's loop if that is quick, else on a thread. Knows no connections.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from w5xde.compression import NONE
from w5xde.control.codec_choice import CodecChoice
from w5xde.errors import RemoteProtocolError, W5xdeError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.sender import CodecSender, is_never_encoded
from w5xde.learn.data.payload import Unpacker
from w5xde.learn.job.job import BatchFailed
from w5xde.learn.job.node_setup import NodeParts
from w5xde.learn.model.layout import Vector, memory_of
from w5xde.learn.model.route import is_large
from w5xde.learn.train.trainer import Outcome, Task
from w5xde.messages import Answer, Loan, Params, Work
from w5xde.protocol.wire import Body
from w5xde.runtime.node.limits import DISCARDED
from w5xde.tree import Span, batch_seed

_ALONE = Span(0, 1)


@dataclass(slots=True)
class Computed:
    """The answers to one Work, the bytes of their vectors, and what it took."""

    answers: list[Answer]
    pieces: list[memoryview]
    # The vectors that `pieces` are views of: they may be used again once the pieces are sent.
    lent: list[Vector]
    compute_seconds: float
    core_seconds: float


class NodeWorker:
    """Computes with one node's model and data. `is_cancelled` says whether a lease is no longer needed."""

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
        if not is_never_encoded(setting, self._blueprint.moving_bytes):
            self._sender = CodecSender(setting, "up", self._blueprint.moving_groups, self._choice, clock)
        # The model's own memory, while parameters are being received into it.
        self._placed: Body | None = None
        # Encoding and decoding since `take_codec_seconds` was last called.
        self._codec_seconds = 0.0

    def take_codec_seconds(self) -> float:
        seconds, self._codec_seconds = self._codec_seconds, 0.0
        return seconds

    def place(self, params: Params, count: int) -> Body | None:
        """Return the model's own memory for parameters to be received into; nothing may be computing."""
        self._placed = None
        if params.codec == NONE and is_large(count):
            self._placed = self.parts.trainer.memory(count, whole=params.whole)
        return self._placed

    def load(self, params: Params, body: Body) -> None:
        """Load a version of the parameters into the model."""
        if params.codec == NONE:
            self.parts.trainer.load(body, whole=params.whole, in_place=body is self._placed)
            self._placed = None
            return
        begun = self._clock()
        groups = self._blueprint.groups if params.whole else self._blueprint.moving_groups
        count = self._blueprint.whole_bytes if params.whole else self._blueprint.moving_bytes
        pipeline = parse(params.codec)
        # Decode straight into the model, if its memory can be shared: nothing is being computed now.
        memory = self.parts.trainer.memory(count, whole=params.whole)
        raw = memory if memory is not None else bytearray(count)
        if count:
            pipeline.decode(body, torch.frombuffer(raw, dtype=torch.uint8), groups)
        self._codec_seconds += self._clock() - begun
        self.parts.trainer.load(raw, whole=params.whole, in_place=memory is not None)

    def compute(self, work: Work, body: Body) -> Computed:
        """Compute every loan that is still needed; drop all if their batches were too large to hold."""
        if 0 < work.link < math.inf:
            self._choice.link(work.link)
        done = Computed([], [], [], 0.0, 0.0)
        if body is DISCARDED:
            done.answers += [Answer(loan.lease, dropped=True) for loan in work.loans]
            return done
        begun, on_core = self._clock(), time.process_time()
        unpacker = Unpacker(body)
        tasks = [self._tasks(loan, unpacker) for loan in work.loans]
        self.parts.trainer.look_ahead([each for some in tasks if isinstance(some, list) for each in some])
        ahead_seconds = (self._clock() - begun) / max(1, len(tasks))
        for loan, some in zip(work.loans, tasks, strict=True):
            begun = self._clock()
            answer, vectors = self._compute(loan, some, begun - ahead_seconds)
            done.compute_seconds += answer.seconds
            if self._sender is None or loan.apart:
                done.lent += vectors
                done.pieces += memory_of(vectors)
            elif vectors:
                answer = self._pack(self._sender, answer, vectors[0], done, begun)
            done.answers.append(answer)
        done.core_seconds = time.process_time() - on_core
        return done

    def _tasks(self, loan: Loan, unpacker: Unpacker) -> list[Task] | W5xdeError:
        """Return the task of a loan, or one for each batch if they are apart; or the error in them."""
        source = self.parts.source
        try:
            batches = []
            for batch in loan.batches:
                value: Any = unpacker.unpack(batch.item, batch.at)
                if source is not None:
                    seed = batch_seed(self.parts.welcome.rules.seed, loan.epoch, batch.index)
                    _require_indices(value, batch.samples, source.samples)
                    value = source.read_indices(value, seed)
                batches.append((batch.index, batch.samples, value))
        except W5xdeError as error:
            return error
        if loan.apart:
            return [Task(loan.epoch, _ALONE, 1, each[1], [each]) for each in batches]
        return [Task(loan.epoch, Span(loan.start, loan.stop), loan.count, loan.samples, batches)]

    def _compute(
        self, loan: Loan, tasks: list[Task] | W5xdeError, begun: float
    ) -> tuple[Answer, list[Vector]]:
        if self._is_cancelled(loan.lease):
            return Answer(loan.lease, dropped=True), []
        outcomes: list[Outcome] = []
        try:
            if isinstance(tasks, W5xdeError):
                raise tasks
            outcomes.extend(map(self.parts.trainer.compute, tasks))
        except (BatchFailed, W5xdeError) as error:
            for outcome in outcomes:
                self.parts.trainer.recycle(outcome.vector)
            return Answer(loan.lease, seconds=self._clock() - begun, failure=str(error)[:2000]), []
        seconds = self._clock() - begun
        losses = [outcome.loss_sum for outcome in outcomes]
        absents = [outcome.absent for outcome in outcomes]
        if loan.apart:
            told = absents if any(absents) else []
            answer = Answer(loan.lease, sum(losses), seconds, losses=losses, absents=told)
        else:
            answer = Answer(loan.lease, losses[0], seconds, absents[0])
        return answer, [outcome.vector for outcome in outcomes]

    def _pack(
        self, sender: CodecSender, answer: Answer, vector: Vector, done: Computed, now: float
    ) -> Answer:
        encoded = sender.encode(vector.raw.cpu(), now)
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
    """Raise unless the value names this many samples of the node's own data."""
    is_list = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == (count,)
    if not is_list or int(value.min()) < 0 or int(value.max()) >= samples:
        raise RemoteProtocolError(f"a batch that does not name {count} of our samples", code="W5-120")
