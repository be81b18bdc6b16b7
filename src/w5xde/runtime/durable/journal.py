"""The keeper: writes down what happens, and keeps what a crash must not take.

The ledger is written at every tick and synced on a thread; a checkpoint is captured between two steps and
written on that thread while training goes on. A disk that fails stops none of this for good: what could not
be written is tried again, and until then the durable mark stands still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from w5xde.control import events as ev
from w5xde.control.ledger_records import Record, Scribe, record_of
from w5xde.control.steps.cut import Cut
from w5xde.errors import JobError
from w5xde.runtime.durable.checkpoints import Store
from w5xde.runtime.durable.disk import Disk
from w5xde.runtime.durable.ledger import Ledger, Mark, Syncing
from w5xde.runtime.durable.step_log import Logged, StepLog, forget_steps

# How much of the ledger a power cut may take; checkpoints sync it themselves.
SYNC_SECONDS = 2.0
# How soon a ledger that could not be written is tried again.
RETRY_SECONDS = 1.0


class Captured(Protocol):
    """What the learner knows, copied: nobody changes it any more."""

    @property
    def version(self) -> int: ...
    def files(self) -> dict[str, bytes]: ...
    def weights_sha256(self) -> str: ...


class Caller(Protocol):
    """Makes calls one after another, and tells on the loop what they returned."""

    def call(self, function: Callable[[], Any], done: Callable[[Any], None] | None = None) -> None: ...


class Keeper:
    """Ledger, checkpoints and step log of one life of a coordinator."""

    def __init__(
        self,
        disk: Disk,
        capture: Callable[[], Captured],
        clock: Callable[[], float],
        *,
        keep: int,
        logs_steps: bool,
    ) -> None:
        self.store = Store(disk, keep)
        self.ledger = Ledger.open(disk, clock)
        self.steps = StepLog(disk, self.life) if logs_steps else None
        self.disk = disk
        self._capture = capture
        self._scribe = Scribe()
        self._failed_at: float | None = None
        self._synced_at = 0.0
        self._is_syncing = False

    @property
    def life(self) -> int:
        """How often this run's coordinator was started."""
        return self.ledger.life

    def begin(self, records: list[Record], version: int, last: Logged | None = None) -> None:
        """Write and sync how this life begins, before anybody can join; `last` is the last step replayed."""
        # What is replayed is on the disk for sure before the ledger calls it durable.
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
        """From now on tell how saving went, by `dispatch`, and what cannot be written, by `note`.

        `learner` calls for the one who owns what is captured, `writer` waits for the disk.
        """
        self._learner = learner
        self._writer = writer
        self._dispatch = dispatch
        self._note = note

    # --- the ledger -------------------------------------------------------------------------------

    def saw(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        self._scribe.saw(event, effects)

    def record(self, record: Record) -> None:
        self._scribe.add(record)

    def tick(self, now: float) -> None:
        """Hand over what was written down, and sync it now and then."""
        if self._failed_at is not None and now - self._failed_at < RETRY_SECONDS:
            return
        self._flush(now)
        if self._failed_at is None and not self._is_syncing and now - self._synced_at >= SYNC_SECONDS:
            self._sync(now)

    def _flush(self, now: float) -> OSError | None:
        try:
            is_written = self.ledger.write(self._scribe.drain())
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

    def _sync(self, now: float) -> None:
        syncing = self.ledger.begin_sync()
        if syncing is None:
            return
        self._synced_at = now
        self._is_syncing = True
        self._writer.call(syncing.sync, lambda _: self._synced(syncing, now))

    def _synced(self, syncing: Syncing, now: float) -> None:
        self._is_syncing = False
        try:
            self.ledger.end_sync(syncing)
        except OSError as error:
            self._failed(error, now)

    # --- checkpoints ------------------------------------------------------------------------------

    def save(self, cut: Cut, facts: dict[str, Any], now: float) -> None:
        """Capture the learner at this very place between two steps, and write it while training goes on."""
        self._learner.call(
            lambda: self._capture_at(cut.version), lambda state: self._captured(state, cut, facts, now)
        )

    def _capture_at(self, version: int) -> Captured | str:
        try:
            state = self._capture()
        except JobError as error:
            return error.what
        if state.version != version:
            return f"the learner is at version {state.version}, not {version}"
        if self.steps is not None:
            self._begin_steps(self.steps, version)
        return state

    def _begin_steps(self, steps: StepLog, version: int) -> None:
        # Steps after this one need only this checkpoint; if the segment cannot be made, none is durable.
        try:
            steps.begin(version)
        except OSError:
            steps.close()

    def _captured(self, state: Captured | str, cut: Cut, facts: dict[str, Any], now: float) -> None:
        if isinstance(state, str):
            self._dispatch(ev.SaveFailed(state))
            return
        # Every step of the checkpoint is in the ledger before the checkpoint is there.
        error = self._flush(now)
        if error is not None:
            self._dispatch(ev.SaveFailed(_reason(error)))
            return
        syncing = self.ledger.begin_sync()
        if syncing is None:
            # A sync is under way, after which writing goes on; the writer does one thing after another.
            self._writer.call(lambda: None, lambda _: self._captured(state, cut, facts, now))
            return
        self._writer.call(
            lambda: self._write(state, cut, facts, syncing),
            lambda written: self._written(written, cut, syncing, now),
        )

    def _store(self, state: Captured, cut: Cut, facts: dict[str, Any], mark: Mark) -> str:
        known = facts | {
            "life": self.life,
            "cut": msgspec.to_builtins(cut, str_keys=True),
            "ledger": msgspec.to_builtins(mark),
            "weights_sha256": state.weights_sha256(),
        }
        return self.store.save(cut.version, {name: [data] for name, data in state.files().items()}, known)

    def _write(self, state: Captured, cut: Cut, facts: dict[str, Any], syncing: Syncing) -> str | OSError:
        syncing.sync()
        if syncing.error is not None:
            return syncing.error
        try:
            sha256 = self._store(state, cut, facts, syncing.mark)
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
        self._scribe.add({"kind": "checkpoint", "version": cut.version, "sha256": written})
        self._dispatch(ev.Saved(cut.progress.steps))

    def sync(self) -> str:
        """Write and sync every record so far, now; returns why that is not possible, or nothing."""
        try:
            if not self.ledger.write(self._scribe.drain()):
                return "the ledger waits for the disk"
            self.ledger.sync()
        except OSError as error:
            return _reason(error)
        return ""

    def save_last(self, cut: Cut, facts: dict[str, Any]) -> str:
        """A checkpoint of the end, now; returns why it could not be written, or nothing."""
        # A checkpoint never outlives the ledger of its steps.
        error = self.sync()
        if error:
            return error
        try:
            state = self._capture()
            sha256 = self._store(state, cut, facts, self.ledger.head)
        except OSError as failure:
            return _reason(failure)
        except JobError as failure:
            return failure.what
        self._scribe.add({"kind": "checkpoint", "version": cut.version, "sha256": sha256})
        return ""

    def stop(self, last: Record) -> None:
        """The last record. What cannot be written now was told before, or is told by the audit."""
        self._scribe.add(last)
        with contextlib.suppress(OSError):
            self.ledger.write(self._scribe.drain())
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
        """Put a step on the disk before it is applied; False if that is not possible now."""
        if self.steps is None:
            return False
        record = {
            "version": step.version,
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
