"""Going on with a run: the newest whole checkpoint, and the steps that were logged after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from w5xde.control.events import Step
from w5xde.control.ledger_records import Record, record_of, step_of
from w5xde.control.steps.cut import Accounts, Aside, Cut
from w5xde.errors import StorageError
from w5xde.runtime.durable.checkpoints import FOLDER, Checkpoint, Store
from w5xde.runtime.durable.disk import Disk
from w5xde.runtime.durable.ledger import Mark, Reading
from w5xde.runtime.durable.sealed_json import NOTHING, Damaged
from w5xde.runtime.durable.step_log import Logged, read_steps

# More batches than anybody puts into one step: a count in a file is no reason to build as many numbers.
STEP_BATCHES_MAX = 2**20


class KeptNode(msgspec.Struct, frozen=True):
    """One node's part in the run, so far."""

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
    """What a checkpoint keeps of all that is counted."""

    loss_first: float | None = None
    loss_last: float | None = None
    loss_mean: float | None = None
    loss_sum: float = 0.0
    losses: int = 0
    evaluation: dict[str, float | None] = {}
    bytes_sent: int = 0
    bytes_received: int = 0
    nodes: list[KeptNode] = []


class Facts(msgspec.Struct, frozen=True):
    """What a checkpoint says besides its files."""

    life: int
    cut: Cut
    ledger: Mark
    weights_sha256: str
    meters: KeptMeters


class KeptShare(msgspec.Struct, frozen=True):
    """Of a step that was logged, what says how much there is to build of it."""

    sizes: list[tuple[int, Annotated[int, msgspec.Meta(ge=1, le=STEP_BATCHES_MAX)]]]


class KeptStep(msgspec.Struct, frozen=True):
    """What a record of the step log says besides its gradient."""

    step: KeptShare
    cut: Cut
    loss_sum: float


def facts_of(checkpoint: Checkpoint) -> Facts:
    """Its facts, if they are facts at all."""
    try:
        # JSON knows only strings as keys, and a cut counts epochs by number.
        return msgspec.convert(checkpoint.facts, Facts, str_keys=True)
    except msgspec.ValidationError as error:
        raise StorageError(
            f"checkpoint step-{checkpoint.version:09} makes no sense: {error}",
            code="W5-407",
            fix="it was not written by w5xde; remove it, and the one before it is used",
        ) from error


@dataclass(frozen=True, slots=True)
class Replayed:
    """A step that was applied again from the log, what was set aside then, and epochs complete by then."""

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
    """From where a coordinator goes on."""

    # None: nothing was ever durable, and everything begins anew.
    cut: Cut | None = None
    version: int = 0
    sha256: str = NOTHING
    damaged: list[str] = field(default_factory=list)
    # What the checkpoint says is set aside; later steps of the log may have set aside more, or less.
    aside: list[Aside] = field(default_factory=list)
    replayed: list[Replayed] = field(default_factory=list)
    last: Logged | None = None
    meters: KeptMeters = field(default_factory=KeptMeters)

    def records(self, aside: list[Aside]) -> list[Record]:
        """What the ledger says of it; `aside` is what is still set aside, all else is tried again."""
        restore = {"kind": "restore", "version": self.version, "sha256": self.sha256, "damaged": self.damaged}
        return [
            restore | {"aside": _keys(self.aside)},
            *(record for each in self.replayed for record in each.records()),
            {"kind": "resumed", "aside": _keys(aside)},
        ]


def _keys(aside: list[Aside]) -> list[tuple[int, int]]:
    return [(each.epoch, each.batch) for each in aside]


def newest(disk: Disk, store: Store, run: str) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from; a run whose checkpoints are all damaged is not begun anew in silence."""
    checkpoint, damaged = store.newest()
    if checkpoint is None and not damaged and _had_checkpoints(disk):
        raise StorageError(
            f"run {run} had checkpoints, and they are gone",
            code="W5-407",
            fix=f"restore {FOLDER}/ from a copy, or start a new run",
        )
    if checkpoint is None and damaged:
        raise StorageError(
            f"no checkpoint of run {run} is whole: {'; '.join(damaged)}",
            code="W5-407",
            fix=f"they are kept in {FOLDER}/ as damaged-…; restore one from a copy, or start a new run",
        )
    return checkpoint, damaged


def _had_checkpoints(disk: Disk) -> bool:
    return any(
        isinstance(record, dict) and record.get("kind") == "checkpoint" for record in Reading(disk).records()
    )


def restore(
    disk: Disk,
    store: Store,
    load: Callable[[dict[str, bytes]], None],
    apply: Callable[[Step, dict[str, Any], bytes], None],
    run: str,
) -> Restored:
    """Find where the run can go on: `load` a checkpoint's files, then `apply` each logged step."""
    checkpoint, damaged = newest(disk, store, run)
    restored = Restored(damaged=damaged)
    if checkpoint is not None:
        facts = facts_of(checkpoint)
        load(checkpoint.files)
        restored.cut, restored.meters = facts.cut, facts.meters
        restored.aside = facts.cut.accounts.aside
        restored.version, restored.sha256 = checkpoint.version, checkpoint.sha256
    # Steps may have been logged before there was any checkpoint.
    for record, body in _whole_steps(disk, restored.version):
        before = restored.cut
        try:
            # JSON knows only strings as keys, and a cut counts epochs by number.
            kept = msgspec.convert(record, KeptStep, str_keys=True)
            step = step_of(record["step"])
            restored.cut = kept.cut
            apply(step, record, body)
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            RuntimeError,
            msgspec.ValidationError,
        ) as error:
            raise StorageError(
                f"step {restored.version + len(restored.replayed)} in the step log cannot be used: {error}",
                code="W5-407",
                fix="resume with the job file the run was started with",
            ) from error
        restored.last = (record, body)
        now = restored.cut.accounts
        completed = now.completed_since(before.accounts if before is not None else Accounts())
        restored.replayed.append(Replayed(step, kept.loss_sum, now.aside, completed))
    return restored


def _whole_steps(disk: Disk, version: int) -> Iterator[Logged]:
    try:
        yield from read_steps(disk, version)
    except Damaged as damage:
        raise StorageError(
            f"the step log cannot be used: {damage}",
            code="W5-407",
            fix="it was not written by w5xde; remove steps-*.log, and the run goes on from its checkpoint",
        ) from damage
