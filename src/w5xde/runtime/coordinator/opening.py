"""Begins a life of a run: opens its folder and its journal, and restores a run that is resumed.

A learning rate that its user changes is in the manifest, with the life and the version that it began with: a
life that crashes before its first checkpoint has changed it all the same. Knows no nodes and no sockets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

import w5xde
from w5xde.config import Settings
from w5xde.control import events as ev
from w5xde.control.coordinator import CoordinatorCore
from w5xde.control.events import Step
from w5xde.control.ledger_records import Record
from w5xde.control.steps.few_steps import few_steps_text
from w5xde.errors import StorageError, UsageError
from w5xde.learn.job.coordinator_setup import Prepared
from w5xde.learn.job.named_job import NamedJob
from w5xde.learn.step.checkpoint import capture, refuse_unkeepable
from w5xde.learn.step.checkpoint import restore as restore_learner
from w5xde.learn.step.learner import Learner
from w5xde.runs import MANIFEST
from w5xde.runtime.durable.again import RunClaim, folder_error
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger import Ledger
from w5xde.runtime.durable.resume import Restored, restore
from w5xde.runtime.durable.run_folder import RunFolder
from w5xde.specs.rate_override import RateOverride

# The manifest's name for changes of the learning rate.
OVERRIDES = "overrides"


def open_folder(settings: Settings, stem: str, claim: RunClaim | None = None) -> RunFolder:
    """Open the folder of a run whose job has this name; a `claim` has locked it already."""
    try:
        return RunFolder(settings, stem, claim)
    except OSError as error:
        raise folder_error(Path(settings.runs), error) from error


def job_facts(named: NamedJob, prepared: Prepared) -> dict[str, Any]:
    """What the manifest says of the job, its code, its data and its model."""
    return {
        "job": named.reference,
        "job_place": named.place,
        "code_sha256": prepared.offer.sha256 or None,
        "versions": prepared.offer.versions,
        "samples": prepared.source.samples,
        "order": prepared.source.order_digest,
        "model": msgspec.to_builtins(prepared.learner.flat.blueprint.layout.entries),
        "scaled_for_batch": prepared.scaling.facts() if prepared.scaling is not None else None,
    }


class _KeptOverride(msgspec.Struct, frozen=True):
    """A change of the learning rate, in the manifest: in which life, before which step, and to what."""

    life: int
    version: int
    override: str


class _Restoration:
    """Restores a learner, and changes its rate where earlier lives have changed it."""

    def __init__(self, learner: Learner, kept: list[_KeptOverride]) -> None:
        self._learner = learner
        # Those that are not in the state that was loaded.
        self._missing = kept

    def load(self, files: Mapping[str, bytes], life: int) -> None:
        """Load a checkpoint, which this life has written."""
        restore_learner(self._learner, files)
        self._missing = [each for each in self._missing if each.life > life]

    def replay(self, step: Step, record: dict[str, Any], body: bytes) -> None:
        """Make a step again from the step log."""
        self._change(until=step.version)
        self._learner.replay(step, body, frozenset(record["absent"]), record["loss_sum"])

    def finish(self) -> None:
        """All steps that are known are made again: make the changes that followed them."""
        self._change()

    def _change(self, until: int | None = None) -> None:
        while self._missing and (until is None or self._missing[0].version <= until):
            self._learner.override_rates(RateOverride.parse(self._missing.pop(0).override))


def open_journal(
    learner: Learner, run_folder: RunFolder, settings: Settings
) -> tuple[Journal, Restored | None]:
    """Open the run's journal; if the run is resumed, restore the learner from its newest checkpoint."""
    if settings.checkpoint_every != "off":
        refuse_unkeepable(learner)
    journal = Journal(
        Ledger(run_folder.disk, time.time),
        lambda: capture(learner),
        keep=settings.keep_checkpoints,
        logs_steps=settings.durability == "step",
    )
    if not run_folder.is_resumed:
        return journal, None
    kept = _kept_overrides(run_folder)
    restoration = _Restoration(learner, list(kept))
    restored = restore(
        journal, restoration.load, restoration.replay, run_folder.name, run_folder.ledger_extent
    )
    restoration.finish()
    _require_epochs(restored, settings, run_folder.name)
    if settings.override is not None:
        override = RateOverride.parse(settings.override)
        before = learner.learning_rates
        learner.override_rates(override)
        restored.rates_changed = (before, learner.learning_rates)
        kept.append(_KeptOverride(journal.life, learner.version, str(override)))
        run_folder.facts[OVERRIDES] = msgspec.to_builtins(kept)
    return journal, restored


def _kept_overrides(run_folder: RunFolder) -> list[_KeptOverride]:
    try:
        kept = msgspec.convert(run_folder.facts.get(OVERRIDES, []), list[_KeptOverride])
        for each in kept:
            RateOverride.parse(each.override)
    except ValueError as error:  # msgspec's ValidationError is one
        raise StorageError(
            f"{run_folder.folder / MANIFEST} makes no sense: {error}",
            code="W5-401",
            fix="restore it from a copy",
        ) from error
    return kept


def _require_epochs(restored: Restored, settings: Settings, run: str) -> None:
    """Refuse an epoch limit that the resumed run has passed already."""
    limit, cut = settings.epoch_limit, restored.cut
    if limit is None or cut is None:
        return
    begun = max([cut.cursor.epoch + (cut.cursor.first > 0), *(step.epoch + 1 for step in cut.undone)])
    if begun > limit:
        raise UsageError(
            f"run {run} is in epoch {begun} already, so --epochs {limit} is too late",
            code="W5-211",
            fix=f"give at least --epochs {begun}, or leave it out",
        )


def begin_life(
    port: int,
    books: tuple[Journal, RunFolder],
    prepared: Prepared,
    core: CoordinatorCore,
    restored: Restored | None,
) -> list[ev.Note]:
    """Write down that this life of the coordinator begins; returns what its user should know."""
    journal, run_folder = books
    _open_ledger(journal, run_folder, prepared.settings, core, restored)
    # After the ledger: a life in the manifest that the ledger does not know proves a loss.
    is_kept = run_folder.manifest(_facts_of_life(port, journal.life, core))
    _require_kept(restored, is_kept=is_kept)
    return list(_opening_notes(prepared, restored, core, journal.life))


def first_records(
    run: str, life: int, mode: str, durability: str, core: CoordinatorCore, restored: Restored | None
) -> list[Record]:
    """The first records of a life in the ledger: its plan, and the place from which it continues."""
    start: Record = {
        "kind": "start",
        "run": run,
        "incarnation": life,
        "w5xde": w5xde.__version__,
        "durability": durability,
        "plan": core.view.plan.facts | {"mode": mode},
    }
    return [start, *(restored.records(core.view.accounts.aside) if restored is not None else [])]


def _open_ledger(
    journal: Journal,
    run_folder: RunFolder,
    settings: Settings,
    core: CoordinatorCore,
    restored: Restored | None,
) -> None:
    """Write the first records of this life to disk; called before any node can join."""
    records = first_records(run_folder.name, journal.life, settings.mode, settings.durability, core, restored)
    try:
        journal.begin(records, core.view.version, restored.last if restored is not None else None)
    except OSError as error:
        raise StorageError(
            f"the ledger in {run_folder.folder} cannot be written: {error.strerror}",
            code="W5-404",
            fix="make room there, or choose another folder with --runs",
        ) from error


def _facts_of_life(port: int, life: int, core: CoordinatorCore) -> dict[str, int | str]:
    """What the manifest says of this life; the lengths of rounds are for `--local-steps @RUN`."""
    lengths = core.view.plan.rounds
    return {"port": port, "life": life} | ({"round_lengths": str(lengths)} if lengths is not None else {})


def _require_kept(restored: Restored | None, *, is_kept: bool) -> None:
    """Refuse to go on with another learning rate that the manifest could not keep."""
    if restored is not None and restored.rates_changed is not None and not is_kept:
        raise StorageError(
            "the manifest cannot be written, so a crash would forget the changed learning rate",
            code="W5-404",
            fix="make room in the run folder",
        )


def _opening_notes(
    prepared: Prepared, restored: Restored | None, core: CoordinatorCore, life: int
) -> Iterator[ev.Note]:
    """Notes for the user about a run that starts or is resumed."""
    for text in prepared.notes:
        yield ev.Note("data", text)
    settings, samples = prepared.settings, prepared.source.samples
    epochs = settings.epoch_limit
    if restored is None and samples and epochs and settings.steps is None:
        is_default = settings.batches_per_step is None
        numbers = (samples, prepared.source.batch_size, settings.step_batches, epochs)
        few = few_steps_text(*numbers, is_default=is_default)
        if few:
            yield ev.Note("few steps", few)
    if prepared.canary_trouble:
        text = f"what nodes compute cannot be tried before they join: {prepared.canary_trouble}"
        yield ev.Note("no canary", text)
    if restored is None:
        return
    for loss in restored.lost:
        yield ev.Note("storage", f"{loss}: the audit can no longer prove what was trained before")
    for damage in restored.damaged:
        yield ev.Note("storage", f"a damaged checkpoint is passed over and kept aside: {damage}")
    steps, epochs = core.view.progress.steps, core.view.progress.epochs
    if restored.cut is None:
        yield ev.Note("goes on", "there is no checkpoint of this run yet: it begins anew")
    else:
        where = f"step {steps}, with {epochs} {'epoch' if epochs == 1 else 'epochs'} complete"
        yield ev.Note("goes on", f"goes on from {where}; life {life} of this run's coordinator")
    if restored.rates_changed is not None:
        before, after = restored.rates_changed
        shown = [", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) for rates in (before, after)]
        text = f"the learning rate is changed from {shown[0]} to {shown[1]}, after step {steps}"
        yield ev.Note("override", text, {"version": core.view.version, "before": before, "after": after})
