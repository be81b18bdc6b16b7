"""Resuming a run: loads the newest whole checkpoint and replays the steps that were logged after it.

Says which parts of the run's past are lost, and refuses to resume where no state can be restored although
the run had durable state. Knows no tensors: callers pass functions that load and apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from w5xde.control.events import Step
from w5xde.control.ledger_records import Record, record_of, step_of
from w5xde.control.steps.cut import Accounts, Aside, Cut
from w5xde.errors import StorageError
from w5xde.runs import MANIFEST
from w5xde.runtime.durable.checkpoints import FOLDER, Checkpoint
from w5xde.runtime.durable.disk import Disk
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger_segments import LedgerReader, Mark, find_missing_segments
from w5xde.runtime.durable.sealed_json import NOTHING, Damaged
from w5xde.runtime.durable.step_log import Logged, read_steps

# More batches than any step has: a count in a damaged file must not make us build as many numbers.
STEP_BATCHES_MAX = 2**20


class KeptNode(msgspec.Struct, frozen=True):
    """One node's part in the run so far, as a checkpoint keeps it."""

    name: str
    device: str
    batches: int
    samples: int
    seconds_busy: float
    seconds_waiting: float
    seconds_on_core: float = 0.0
    seconds_network: float = 0.0
    seconds_codec: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    vector_bytes: int = 0
    vector_bytes_encoded: int = 0


class KeptMeters(msgspec.Struct, frozen=True):
    """The run's measurements, as a checkpoint keeps them."""

    loss_first: float | None = None
    loss_last: float | None = None
    loss_mean: float | None = None
    loss_sum: float = 0.0
    losses: int = 0
    evaluation: dict[str, float | None] = {}
    evaluation_step: int | None = None
    evaluation_epoch: int | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    # Bytes of batches that were sent, by epoch.
    data_bytes: dict[int, int] = {}
    nodes: list[KeptNode] = []


class LedgerExtent(msgspec.Struct, frozen=True):
    """How far the ledger was once durable: in which life, and up to which line. The manifest has one too."""

    life: int = 0
    ledger: Mark = Mark()


NO_LEDGER = LedgerExtent()


class Facts(msgspec.Struct, frozen=True):
    """A checkpoint's facts, besides its files. `life` and `ledger` are those of a `LedgerExtent`."""

    life: int
    cut: Cut
    ledger: Mark
    weights_sha256: str
    meters: KeptMeters
    # What callbacks keep, by their names.
    callbacks: dict[str, Any] = {}


class _LoggedSizes(msgspec.Struct, frozen=True):
    """The batches of a logged step: pairs of (samples, number of such batches)."""

    sizes: list[tuple[int, Annotated[int, msgspec.Meta(ge=1, le=STEP_BATCHES_MAX)]]]


class _LoggedStep(msgspec.Struct, frozen=True):
    """A record of the step log, without its gradient."""

    step: _LoggedSizes
    cut: Cut
    loss_sum: float


def extent_of(manifest: dict[str, Any], folder: Path) -> LedgerExtent:
    """Return how far a run's manifest says that the ledger was written."""
    try:
        return msgspec.convert(manifest, LedgerExtent)
    except msgspec.ValidationError as error:
        raise StorageError(
            f"{folder / MANIFEST} makes no sense: {error}", code="W5-401", fix="restore it from a copy"
        ) from error


def facts_of(checkpoint: Checkpoint) -> Facts:
    """Return a checkpoint's facts; StorageError if they make no sense."""
    try:
        # JSON has only strings as keys, and a cut counts epochs by number.
        return msgspec.convert(checkpoint.facts, Facts, str_keys=True)
    except msgspec.ValidationError as error:
        raise StorageError(
            f"checkpoint step-{checkpoint.version:09} makes no sense: {error}",
            code="W5-407",
            fix="it was not written by w5xde; remove it, and the one before it is used",
        ) from error


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step applied again from the log, with the batches set aside and the epochs complete at that step."""

    step: Step
    loss_sum: float
    aside: list[Aside]
    completed: list[int]

    def records(self) -> list[Record]:
        marks = {"durable": True, "replayed": True, "aside": _keys(self.aside)}
        found = [record_of(self.step) | marks]
        for epoch in self.completed:
            missing = [each.batch for each in self.aside if each.epoch == epoch]
            text = f"epoch {epoch + 1} is complete"
            found.append({"kind": "epoch", "text": text, "epoch": epoch + 1, "aside": missing})
        return found


@dataclass(slots=True)
class Restored:
    """The place in the run from which a coordinator continues."""

    # None: no step was ever durable, and the run begins anew.
    cut: Cut | None = None
    version: int = 0
    sha256: str = NOTHING
    # Newer checkpoints that are damaged, and parts of the ledger that are missing: one sentence each.
    damaged: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    # The batches set aside at the checkpoint; replayed steps may have set aside more, or fewer.
    aside: list[Aside] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)
    last: Logged | None = None
    meters: KeptMeters = field(default_factory=KeptMeters)
    callbacks: dict[str, Any] = field(default_factory=dict)
    # The learning rates before and after the user changed them for this life.
    rates_changed: tuple[list[float], list[float]] | None = None

    def records(self, aside: list[Aside]) -> list[Record]:
        """Return the ledger records of this restart; `aside`: batches that are not tried again."""
        restore = {"kind": "restore", "version": self.version, "sha256": self.sha256, "damaged": self.damaged}
        return [
            *({"kind": "lost", "text": text} for text in self.lost),
            restore | {"aside": _keys(self.aside)},
            *(record for each in self.replayed for record in each.records()),
            {"kind": "resumed", "aside": _keys(aside)},
        ]


def _keys(aside: list[Aside]) -> list[tuple[int, int]]:
    return [(each.epoch, each.batch) for each in aside]


def restore(
    journal: Journal,
    load: Callable[[Mapping[str, bytes], int], None],
    apply: Callable[[Step, dict[str, Any], bytes], None],
    run: str,
    extent: LedgerExtent = NO_LEDGER,
) -> Restored:
    """Restore a run: `load` a checkpoint's files, with the life that wrote it, then `apply` each logged step.

    `extent` is the manifest's word on how far the ledger went.
    """
    checkpoint, damaged = journal.store.newest()
    facts = facts_of(checkpoint) if checkpoint is not None else None
    restored = Restored(damaged=damaged, lost=_find_losses(journal, extent, facts or extent))
    journal.begin_life_after(max(extent.life, facts.life if facts is not None else 0))
    if checkpoint is not None and facts is not None:
        load(checkpoint.files, facts.life)
        restored.cut, restored.meters, restored.callbacks = facts.cut, facts.meters, facts.callbacks
        restored.aside = facts.cut.accounts.aside
        restored.version, restored.sha256 = checkpoint.version, checkpoint.sha256
    else:
        _require_never_saved(journal.disk, restored, run)
    # Steps may have been logged before there was any checkpoint.
    try:
        for record, body in read_steps(journal.disk, restored.version):
            before = restored.cut.accounts if restored.cut is not None else Accounts()
            logged = msgspec.convert(record, _LoggedStep, str_keys=True)
            step = step_of(record["step"])
            apply(step, record, body)
            restored.cut, restored.last = logged.cut, (record, body)
            now = logged.cut.accounts
            restored.replayed.append(Replayed(step, logged.loss_sum, now.aside, now.completed_since(before)))
    except Damaged as damage:
        raise StorageError(
            f"the step log cannot be used: {damage}",
            code="W5-407",
            fix="it was not written by w5xde; remove steps-*.log, and the run goes on from its checkpoint",
        ) from damage
    # msgspec's ValidationError is a ValueError.
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise StorageError(
            f"step {restored.version + len(restored.replayed)} in the step log cannot be used: {error}",
            code="W5-407",
            fix="resume with the job file the run was started with",
        ) from error
    return restored


def _find_losses(journal: Journal, *durable: LedgerExtent | Facts) -> list[str]:
    """Describe the parts of the ledger that are missing, of which all up to `durable` was synced."""
    found = find_missing_segments(journal.disk)
    life, records = journal.life - 1, journal.ledger.head.records
    lives, lines = max(each.life for each in durable), max(each.ledger.records for each in durable)
    if life < lives or records < lines:
        found.append(
            f"the ledger has lost its end: it has {records} lines up to life {life}, and had at least"
            f" {lines} lines up to life {lives}"
        )
    return found


def _require_never_saved(disk: Disk, restored: Restored, run: str) -> None:
    """Refuse to begin a run anew that had a checkpoint, or may have had one."""
    if restored.damaged:
        raise StorageError(
            f"no checkpoint of run {run} is whole: {'; '.join(restored.damaged)}",
            code="W5-407",
            fix=f"they are kept in {FOLDER}/ as damaged-…; restore one from a copy, or start a new run",
        )
    had_one = any(
        isinstance(record, dict) and record.get("kind") == "checkpoint"
        for record in LedgerReader(disk).records()
    )
    if had_one or restored.lost:
        what = (
            "had checkpoints, and they are gone" if had_one else f"has no checkpoint, and {restored.lost[0]}"
        )
        raise StorageError(
            f"run {run} {what}",
            code="W5-407",
            fix=f"restore {FOLDER}/ from a copy, or start a new run",
        )
