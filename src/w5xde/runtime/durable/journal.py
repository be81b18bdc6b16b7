"""The journal of a running coordinator: writes its ledger, its checkpoints and its step log.

The loop writes ledger records at every tick; a thread syncs and compresses them. The learner's thread
captures a checkpoint between two steps, and the writing thread saves it while training goes on. Of a large
model no copy is captured: the learner's thread writes its files, and the writing thread syncs them. A disk
that fails stops none of this for good: the journal tries again, and until then no further step becomes
durable.
Knows no tensors, sockets or clocks: callers pass `now`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from w5xde.control import events as ev
from w5xde.control.ledger_records import Record, RecordBuilder, record_of
from w5xde.control.steps.cut import Cut
from w5xde.errors import JobError
from w5xde.runtime.durable.checkpoints import CheckpointStore, StagedCheckpoint
from w5xde.runtime.durable.disk import Piece
from w5xde.runtime.durable.ledger import Ledger, Syncing
from w5xde.runtime.durable.ledger_segments import Mark, compress_segments
from w5xde.runtime.durable.step_log import Logged, StepLog, forget_steps

# How much of the ledger a power cut may take; checkpoints sync it themselves.
SYNC_SECONDS = 2.0
# How soon a ledger that could not be written is tried again.
RETRY_SECONDS = 1.0
# Closed segments smaller than this share of a full one stay plain: compressing them saves next to nothing.
COMPRESSED_SHARE_MIN = 1 / 16


class CapturedState(Protocol):
    """The learner's state between two steps."""

    @property
    def version(self) -> int: ...
    @property
    def is_live(self) -> bool:
        """Whether it is the learner's own memory, which the next step changes, and not a copy."""

    def files(self) -> Mapping[str, Iterable[Piece]]: ...
    def weights_sha256(self) -> str: ...


# A copy, or (of a large model) files that are written and wait to be synced.
Unsaved = CapturedState | StagedCheckpoint


class Caller(Protocol):
    """Makes calls one after another, and passes each result to `done` on the loop."""

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None: ...


class Journal:
    """Ledger, checkpoints and step log of one life of a coordinator."""

    def __init__(
        self, ledger: Ledger, capture: Callable[[], CapturedState], *, keep: int, logs_steps: bool
    ) -> None:
        self.ledger = ledger
        self.disk = ledger.disk
        self.store = CheckpointStore(self.disk, keep)
        self.steps = StepLog(self.disk, ledger.life) if logs_steps else None
        self._capture = capture
        self._records = RecordBuilder()
        self._failed_at: float | None = None
        self._synced_at = 0.0
        # All closed segments up to this number are compressed, or too small for it.
        self._compressed_segments = 0

    @property
    def life(self) -> int:
        """How many times this run's coordinator was started."""
        return self.ledger.life

    def begin_life_after(self, life: int) -> None:
        """Number this life higher than `life`, whatever the ledger still knows. Call it before `begin`.

        Leases carry the number: an answer to a lease of another life must not be taken for one of this life.
        """
        self.ledger.life = max(self.life, life + 1)
        if self.steps is not None:
            self.steps.life = self.life

    def begin(self, records: list[Record], version: int, last: Logged | None = None) -> None:
        """Write and sync the first records of this life before nodes join. `last`: see `StepLog.resume`."""
        # Replayed steps are surely on the disk before the ledger calls them durable.
        if self.steps is not None:
            self.steps.resume(version, last)
        self.ledger.write(records)
        self.ledger.sync()

    def start(
        self,
        learner: Caller,
        writer: Caller,
        dispatch: Callable[[ev.Event], None],
        note: Callable[[str], None],
    ) -> None:
        """Set the threads to use: `learner` owns what is captured, `writer` waits for the disk.

        `dispatch` receives the outcome of each save; `note` receives sentences about a failing disk.
        """
        self._learner = learner
        self._writer = writer
        self._dispatch = dispatch
        self._note = note

    # --- the ledger -------------------------------------------------------------------------------

    def saw(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._records.saw(event, effects)

    def record(self, record: Record) -> None:
        self._records.add(record)

    def tick(self, now: float) -> None:
        """Write the records since the last tick, and begin a sync every `SYNC_SECONDS`."""
        if self._failed_at is not None and now - self._failed_at < RETRY_SECONDS:
            return
        self._flush(now)
        if self._failed_at is None and now - self._synced_at >= SYNC_SECONDS:
            syncing = self.ledger.begin_sync()
            if syncing is not None:
                self._synced_at = now
                self._writer.call(syncing.sync, lambda _: self._synced(syncing, now))

    def _flush(self, now: float) -> OSError | None:
        try:
            is_written = self.ledger.write(self._records.drain())
        except OSError as error:
            self._failed(error, now)
            return error
        if self._failed_at is not None and is_written:
            self._failed_at = None
            self._note("the ledger is written again; nothing of it is missing")
        return None

    def _failed(self, error: OSError, now: float) -> None:
        if self._failed_at is None:
            self._note(
                f"the ledger cannot be written: {error.strerror}; training goes on, nothing more is safe"
            )
        self._failed_at = now

    def _synced(self, syncing: Syncing, now: float) -> None:
        try:
            self.ledger.end_sync(syncing)
        except OSError as error:
            self._failed(error, now)
            return
        closed = self.ledger.closed_segments
        if closed > self._compressed_segments:
            self._writer.call(lambda: self._compress(closed))

    def _compress(self, closed: int) -> None:
        """Compress the segments up to this number, on the writing thread."""
        numbers = range(self._compressed_segments + 1, closed + 1)
        # A disk that is full leaves them as they are; the next sync tries again.
        with contextlib.suppress(OSError):
            compress_segments(self.disk, numbers, int(self.ledger.segment_bytes * COMPRESSED_SHARE_MIN))
            self._compressed_segments = closed

    def record_durably(self, record: Record, now: float, done: Callable[[str], None]) -> None:
        """Write and sync a record; `done` gets why that was not possible, or an empty string."""
        self.record(record)
        self._sync_records(now, done)

    def _sync_records(self, now: float, done: Callable[[str], None]) -> None:
        error = self._flush(now)
        if error is not None:
            done(_reason(error))
            return
        if self.ledger.is_synced:
            done("")
            return
        syncing = self.ledger.begin_sync()
        if syncing is None:
            # Another sync is under way; the writer makes one call after another.
            self._writer.call(lambda: None, lambda _: self._sync_records(now, done))
            return

        def synced(_: None) -> None:
            self._synced(syncing, now)
            done(_reason(syncing.error) if syncing.error is not None else "")

        self._writer.call(syncing.sync, synced)

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, cut: Cut, facts: dict[str, Any], now: float) -> None:
        """Capture the learner right after the steps of `cut`, and write it while training goes on."""
        self._learner.call(
            lambda: self._capture_at(cut.version), lambda state: self._captured(state, cut, facts, now)
        )

    def _capture_at(self, version: int) -> Unsaved | str:
        try:
            state = self._capture()
            if state.version != version:
                return f"the learner is at version {state.version}, not {version}"
            captured = self._stage(state) if state.is_live else state
        except JobError as error:
            return error.what
        except OSError as error:
            return _reason(error)
        if self.steps is not None:
            # Later steps need only this checkpoint. Without a new segment none of them is durable.
            try:
                self.steps.begin(version)
            except OSError:
                self.steps.close()
        return captured

    def _captured(self, state: Unsaved | str, cut: Cut, facts: dict[str, Any], now: float) -> None:
        if isinstance(state, str):
            self._dispatch(ev.SaveFailed(state))
            return
        # Every step of the checkpoint is in the ledger before the checkpoint exists.
        error = self._flush(now)
        if error is not None:
            self._give_up(state, error)
            return
        syncing = self.ledger.begin_sync()
        if syncing is None:
            # Another sync is under way; the writer makes one call after another.
            self._writer.call(lambda: None, lambda _: self._captured(state, cut, facts, now))
            return
        self._writer.call(
            lambda: self._write(state, cut, facts, syncing),
            lambda written: self._written(written, cut, syncing, now),
        )

    def _give_up(self, state: Unsaved, error: OSError) -> None:
        failed = ev.SaveFailed(_reason(error))
        if isinstance(state, StagedCheckpoint):
            self._writer.call(lambda: self.store.discard(state), lambda _: self._dispatch(failed))
        else:
            self._dispatch(failed)

    def _stage(self, state: CapturedState) -> StagedCheckpoint:
        return self.store.stage(state.version, state.files(), {"weights_sha256": state.weights_sha256()})

    def _commit(self, state: Unsaved, cut: Cut, facts: dict[str, Any], mark: Mark) -> str:
        staged = state if isinstance(state, StagedCheckpoint) else self._stage(state)
        more = {
            "life": self.life,
            "cut": msgspec.to_builtins(cut, str_keys=True),
            "ledger": msgspec.to_builtins(mark),
        }
        return self.store.commit(staged, facts | more)

    def _write(self, state: Unsaved, cut: Cut, facts: dict[str, Any], syncing: Syncing) -> str | OSError:
        syncing.sync()
        if syncing.error is not None:
            if isinstance(state, StagedCheckpoint):
                self.store.discard(state)
            return syncing.error
        try:
            sha256 = self._commit(state, cut, facts, syncing.mark)
            if self.steps is not None:
                forget_steps(self.disk, self.store.versions()[0])
        except OSError as error:
            return error
        return sha256

    def _written(self, written: str | OSError, cut: Cut, syncing: Syncing, now: float) -> None:
        self._synced(syncing, now)
        if isinstance(written, OSError):
            self._dispatch(ev.SaveFailed(_reason(written)))
            return
        if self.steps is not None:
            self._learner.call(self.steps.anchored)
        self.record({"kind": "checkpoint", "version": cut.version, "sha256": written})
        self._dispatch(ev.Saved(cut.progress.steps))

    def sync(self) -> str:
        """Write and sync every record so far, now; return why that is not possible, or an empty string."""
        try:
            if not self.ledger.write(self._records.drain()):
                return "the ledger waits for the disk"
            self.ledger.sync()
        except OSError as error:
            return _reason(error)
        return ""

    def save_last(self, cut: Cut, facts: dict[str, Any]) -> str:
        """Write a last checkpoint now; return why it could not be written, or an empty string."""
        # A checkpoint never outlives the ledger of its steps.
        error = self.sync()
        if error:
            return error
        try:
            sha256 = self._commit(self._capture(), cut, facts, self.ledger.head)
        except OSError as failure:
            return _reason(failure)
        except JobError as failure:
            return failure.what
        self.record({"kind": "checkpoint", "version": cut.version, "sha256": sha256})
        return ""

    def stop(self, last: Record) -> None:
        """Write the last record. A failing disk was noted before, or the audit finds the end missing."""
        self.record(last)
        with contextlib.suppress(OSError):
            self.ledger.write(self._records.drain())
            self.ledger.sync()
        self.ledger.close()
        if self.steps is not None:
            self.steps.close()

    @property
    def head(self) -> dict[str, Any]:
        """Where the ledger stands: its last hash, and how many records it has."""
        head: dict[str, Any] = msgspec.to_builtins(self.ledger.head)
        return head

    # --- steps ------------------------------------------------------------------------------------

    def log_step(
        self, step: ev.Step, cut: Cut, body: bytes | memoryview, absent: list[int], loss_sum: float
    ) -> bool:
        """Log a step before it counts; return False if it is not durable."""
        if self.steps is None:
            return False
        record = {
            "version": step.version,
            "steps": step.steps,
            "step": record_of(step),
            "cut": msgspec.to_builtins(cut, str_keys=True),
            "absent": absent,
            "loss_sum": loss_sum,
        }
        try:
            return self.steps.write(record, body)
        except OSError:
            return False


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
