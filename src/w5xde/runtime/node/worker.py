"""The worker of a node: loads parameters into the model, computes work, and encodes the answers.

Runs where the trainer runs: on the node's loop if that is quick, else on a thread. Knows no connections.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from w5xde.compression import NONE
from w5xde.control.codec_choice import CodecChoice
from w5xde.errors import RemoteProtocolError, W5xdeError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.codecs.sender import CodecSender, is_never_encoded
from w5xde.learn.data.payload import Unpacker
from w5xde.learn.data.sources import Key, MapSource
from w5xde.learn.job.job import BatchFailed
from w5xde.learn.job.node_setup import NodeParts
from w5xde.learn.model.layout import Vector
from w5xde.learn.rounds.columns import Columns
from w5xde.learn.step.local_steps import StepsCancelled
from w5xde.learn.train.trainer import Outcome, Task, alone_tasks
from w5xde.learn.train.validation_set import read_batch
from w5xde.message_types import StepRates
from w5xde.messages import Answer, Batch, Difference, Loan, Params, Work
from w5xde.protocol.wire import Body
from w5xde.runtime.node.limits import DISCARDED
from w5xde.runtime.node.listed_batches import ListedBatches
from w5xde.runtime.node.readers import BatchReaders
from w5xde.runtime.node.sample_cache import SampleCache
from w5xde.tree import Span


@dataclass(slots=True)
class Computed:
    """The answers to one Work, the bytes of their vectors, and what it took."""

    answers: list[Answer] = field(default_factory=list)
    pieces: list[memoryview] = field(default_factory=list)
    # The squared norm of each batch's gradient, if the Work wants them and all of it was computed.
    squares: list[float] = field(default_factory=list)
    # What the batches of each answer weigh, if the job weighs batches.
    weights: list[float] = field(default_factory=list)
    # The vectors that `pieces` are views of: they may be used again once the pieces are sent.
    lent: list[Vector] = field(default_factory=list)
    compute_seconds: float = 0.0
    core_seconds: float = 0.0
    # Whether the node keeps the samples that came with the Work.
    stored: bool = False
    # In rounds mode: nothing was computed, because the node's parameters are not those of the Work.
    differs: bool = False


class SamplesMissing(Exception):
    """Samples of a lease are not in the node's cache; `bits` says which."""

    def __init__(self, bits: bytes) -> None:
        super().__init__("samples are missing")
        self.bits = bits


class NodeWorker:
    """Computes with one node's model and data. `is_cancelled` says whether a lease is no longer needed."""

    def __init__(
        self, parts: NodeParts, clock: Callable[[], float], is_cancelled: Callable[[int], bool]
    ) -> None:
        self.parts = parts
        # Where this node keeps samples, if it does.
        self.cache: SampleCache | None = None
        # Processes that read batches, if this node has its own data and such processes.
        self.readers: BatchReaders | None = None
        self._clock = clock
        self._is_cancelled = is_cancelled
        self._blueprint = parts.trainer.blueprint
        vectors = parts.columns.vectors if parts.columns is not None else self._blueprint
        self._choice = CodecChoice()
        setting = parts.welcome.rules.compress
        self._sender: CodecSender | None = None
        if not is_never_encoded(setting, vectors.moving_bytes):
            self._sender = CodecSender(
                setting, "up", vectors.moving_groups, self._choice, clock, feeds_back=parts.columns is None
            )
        # The model's own memory, while parameters are being received into it.
        self._placed: Body | None = None
        # In rounds mode: why the parameters are not those of the coordinator, until the user was told.
        self.trouble = ""
        # Encoding and decoding since `take_codec_seconds` was last called.
        self._codec_seconds = 0.0

    def take_codec_seconds(self) -> float:
        seconds, self._codec_seconds = self._codec_seconds, 0.0
        return seconds

    def take_notes(self) -> list[tuple[str, str]]:
        """What the user of this node should know by now: (kind, sentence) each."""
        found = []
        if self.trouble:
            found.append(("replica", f"{self.trouble}; asking for all of them"))
            self.trouble = ""
        if self.readers is not None and self.readers.trouble:
            found.append(("reading", self.readers.trouble))
            self.readers = None
        return found

    def place(self, params: Params, count: int) -> Body | None:
        """Return the model's own memory for parameters to be received into; nothing may be computing."""
        self._placed = None
        if params.codec == NONE:
            self._placed = self.parts.trainer.memory(count, whole=params.whole)
        return self._placed

    def load(self, params: Params | Difference, body: Body) -> None:
        """Load a version of the parameters into the model, or add what a round changed in them."""
        columns = self.parts.columns
        if isinstance(params, Difference):
            self._follow(_require_columns(columns), params, body)
            return
        self._load_version(params, body)
        if columns is not None:
            columns.loaded(params.version)

    def _follow(self, columns: Columns, message: Difference, body: Body) -> None:
        begun = self._clock()
        difference = columns.vectors.new_vector()
        if len(difference.raw):
            parse(message.codec).decode(body, difference.raw, columns.vectors.moving_groups)
        self._codec_seconds += self._clock() - begun
        place = message.after, message.version, message.replica
        trouble = columns.follow(difference, *place, adds=message.adds)
        if trouble:
            self.trouble = trouble

    def _load_version(self, params: Params, body: Body) -> None:
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

    def read_ahead(self, work: Work, body: Body) -> None:
        """Let the batches of work that waits be read, if processes of this node do that."""
        if self.readers is None or body is DISCARDED:
            return
        unpacker = Unpacker(body)
        for loan in work.loans:
            for batch in () if loan.validates else loan.batches:
                try:
                    chosen = self._own_samples(batch, unpacker, self.parts.source)
                    self.readers.ask((loan.epoch, batch.index), chosen)
                except W5xdeError:
                    return  # `compute` says why

    @staticmethod
    def _own_samples(batch: Batch, unpacker: Unpacker, source: MapSource | None) -> torch.Tensor:
        """The numbers of a batch's samples in the node's own data."""
        count, value = batch.samples, unpacker.unpack(batch.item, batch.at)
        samples = source.samples if source is not None else 0
        is_list = isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.shape == (count,)
        if not is_list or int(value.min()) < 0 or int(value.max()) >= samples:
            raise RemoteProtocolError(f"a batch that does not name {count} of our samples", code="W5-120")
        return torch.as_tensor(value)

    def compute(self, work: Work, body: Body) -> Computed:
        """Compute every loan that is still needed; drop all if their batches were too large to hold."""
        if 0 < work.link < math.inf:
            self._choice.link(work.link)
        if body is DISCARDED:
            return Computed([Answer(loan.lease, dropped=True) for loan in work.loans])
        columns = self.parts.columns
        if columns is not None and columns.version != work.version:
            return Computed([Answer(loan.lease, dropped=True) for loan in work.loans], differs=True)
        try:
            self.parts.trainer.take_call(work.call)
        except RemoteProtocolError as error:
            return Computed([Answer(loan.lease, failure=error.what) for loan in work.loans])
        done = Computed()
        begun, on_core = self._clock(), time.process_time()
        types, rules, cache = self.parts.trainer.types, self.parts.welcome.rules, self.cache
        unpacker = Unpacker(body, types)
        listed = ListedBatches(cache, rules, body, types) if cache is not None else None
        makes_steps = columns is not None
        tasks = [self._tasks(loan, unpacker, listed, measures=work.measures) for loan in work.loans]
        done.stored = listed is not None and listed.stored
        # Local steps change the parameters after each batch: none of these can be computed ahead.
        ahead: list[Task] = []
        for loan, some in zip(work.loans, tasks, strict=True):
            is_alone = loan.apart or makes_steps or loan.validates
            ahead += some if isinstance(some, list) and not is_alone else []
        self.parts.trainer.compute_together(ahead)
        ahead_seconds = (self._clock() - begun) / max(1, len(tasks))
        for loan, some in zip(work.loans, tasks, strict=True):
            begun = self._clock()
            answer, outcome = self._compute(loan, some, work.rates, begun - ahead_seconds)
            done.compute_seconds += answer.seconds
            vector = None if outcome is None else outcome.vector
            if outcome is not None:
                done.squares += outcome.squares
            if rules.weight_unit:
                done.weights.append((outcome.weight or 0.0) if outcome is not None else 0.0)
            if vector is not None and (self._sender is None or loan.apart):
                done.lent.append(vector)
                done.pieces.append(vector.memory)
            elif vector is not None and self._sender is not None:
                answer = self._pack(self._sender, answer, vector, done, begun)
            done.answers.append(answer)
        if self.readers is not None:
            trained = [loan for loan in work.loans if not loan.validates]
            self.readers.forget([(loan.epoch, batch.index) for loan in trained for batch in loan.batches])
        if len(done.squares) != sum(len(loan.batches) for loan in work.loans):
            done.squares.clear()  # a loan failed, or was dropped
        done.core_seconds = time.process_time() - on_core
        return done

    def recycle(self, computed: Computed) -> None:
        """The vectors of these answers were sent, or will never be: their memory may be used again."""
        for vector in computed.lent:
            self._recycle(vector)

    def _recycle(self, vector: Vector) -> None:
        # What a column gives is not laid out like a gradient.
        if self.parts.columns is None:
            self.parts.trainer.recycle(vector)

    def _tasks(
        self, loan: Loan, unpacker: Unpacker, listed: ListedBatches | None, *, measures: bool
    ) -> list[Task] | W5xdeError | SamplesMissing:
        """Return the task of a loan, or one for each batch if it is `apart`; or why there is none."""
        parts = self.parts
        source = parts.validation if loan.validates else parts.source
        try:
            batches = []
            for batch in loan.batches:
                value: Any
                if source is not None:
                    chosen = self._own_samples(batch, unpacker, source)
                    value = self._read(source, loan, batch.index, chosen)
                elif batch.listed is None:
                    value = unpacker.unpack(batch.item, batch.at)
                else:
                    value = _require(listed).read(batch, batch.listed)
                batches.append((batch.index, batch.samples, value))
        except W5xdeError as error:
            if listed is not None:
                listed.stored = False
            return error
        if listed is not None and (missing := listed.take_missing(loan)):
            return SamplesMissing(missing)
        if loan.apart or (parts.columns is not None and not loan.validates):
            return alone_tasks(loan.epoch, loan.step, batches)
        span = Span(loan.start, loan.stop)
        return [Task(loan.epoch, span, loan.count, loan.samples, batches, measures, loan.step)]

    def _read(self, source: MapSource, loan: Loan, number: int, indices: torch.Tensor) -> Any:
        if loan.validates:
            return read_batch(source, indices, number)
        key: Key = (loan.epoch, number)
        readers = self.readers
        return readers.take(key, indices) if readers is not None else source.read_indices(indices, *key)

    def _compute(
        self,
        loan: Loan,
        tasks: list[Task] | W5xdeError | SamplesMissing,
        rates: StepRates | None,
        begun: float,
    ) -> tuple[Answer, Outcome | None]:
        """The answer to a loan, and what was computed for it."""
        if isinstance(tasks, SamplesMissing):
            return Answer(loan.lease, dropped=True, missing=tasks.bits), None
        if self._is_cancelled(loan.lease):
            return Answer(loan.lease, dropped=True), None
        try:
            if isinstance(tasks, W5xdeError):
                raise tasks
            if loan.validates:
                return self._measure(loan, tasks[0], begun), None
            if rates is not None:
                columns, lease = _require_columns(self.parts.columns), loan.lease
                outcome = columns.compute(tasks, rates, lambda: self._is_cancelled(lease))
            elif loan.apart:
                outcome = self.parts.local_steps.compute(tasks)
            else:
                outcome = self.parts.trainer.compute(tasks[0])
        except StepsCancelled:
            return Answer(loan.lease, seconds=self._clock() - begun, dropped=True), None
        except (BatchFailed, W5xdeError) as error:
            return Answer(loan.lease, seconds=self._clock() - begun, failure=str(error)[:2000]), None
        seconds = self._clock() - begun
        return Answer(loan.lease, outcome.loss_sum, seconds, outcome.absent), outcome

    def _measure(self, loan: Loan, task: Task, begun: float) -> Answer:
        """What the job measures in each batch of a validation. Raises BatchFailed."""
        rows = []
        for number, _, value in task.batches:
            if self._is_cancelled(loan.lease):
                return Answer(loan.lease, seconds=self._clock() - begun, dropped=True)
            rows.append(self.parts.trainer.measure(value, number))
        return Answer(loan.lease, seconds=self._clock() - begun, metrics=rows)

    def _pack(
        self, sender: CodecSender, answer: Answer, vector: Vector, done: Computed, now: float
    ) -> Answer:
        encoded = sender.encode(vector.raw.cpu(), now)
        self._codec_seconds += encoded.seconds
        done.pieces += encoded.pieces
        if encoded.spec == NONE:
            done.lent.append(vector)
            return answer
        self._recycle(vector)
        return Answer(
            answer.lease,
            answer.loss_sum,
            answer.seconds,
            answer.absent,
            codec=encoded.spec,
            body_bytes=encoded.encoded_bytes,
        )


def _require_columns(columns: Columns | None) -> Columns:
    if columns is None:
        raise RemoteProtocolError("a part of a round, and this run has no rounds", code="W5-120")
    return columns


def _require(listed: ListedBatches | None) -> ListedBatches:
    if listed is None:
        raise RemoteProtocolError("a list of samples, and this node keeps none", code="W5-120")
    return listed
