"""What must hold of everything that reads a run folder: a value or the documented error, whoever wrote it.

Hashes prove only that bytes are as they were written, not who wrote them: what is sealed here is sealed
right, and may hold anything.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import w5xde
from tests.learn.states import content_of
from tests.security.measure import refusal_of, require
from tests.sim.disk import VirtualDisk
from tests.system.jobs import data, loss
from w5xde.config import Settings
from w5xde.errors import JoinError, UsageError
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.checkpoint import capture, restore
from w5xde.learn.step.learner import Learner
from w5xde.runs import MANIFEST, read_manifest
from w5xde.runtime.admission.register import Entrance, TicketRegister
from w5xde.runtime.durable.audit import audit_disk
from w5xde.runtime.durable.checkpoints import CheckpointStore
from w5xde.runtime.durable.disk import Disk, RealDisk
from w5xde.runtime.durable.journal import Journal
from w5xde.runtime.durable.ledger import Ledger
from w5xde.runtime.durable.ledger_segments import segment_name
from w5xde.runtime.durable.resume import facts_of
from w5xde.runtime.durable.resume import restore as restore_run
from w5xde.runtime.durable.sealed_json import NOTHING, seal, unseal
from w5xde.runtime.evaluation.export import export_run

# --- what a learner knows -------------------------------------------------------------------------

JOB = w5xde.Job(
    model=lambda: torch.nn.Linear(10, 4),
    data=data,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5),
)


@lru_cache(1)
def a_learner() -> Learner:
    """One for all: whoever lets it take over something puts the honest state back."""
    return prepare(JOB, Settings()).learner


@lru_cache(1)
def honest_files() -> dict[str, bytes]:
    return content_of(capture(prepare(JOB, Settings()).learner))


def check_learner_files(files: dict[str, bytes]) -> bool:
    """A learner takes them over, or says in a sentence why not; True if it took them."""
    learner, honest = a_learner(), honest_files()
    before = dict(vars(learner.scheduler))
    chance = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused = refusal_of(lambda: restore(learner, files))
        if refused is None:
            # Generators that were given nonsense read beyond their memory.
            require(0 <= np.random.get_state()[2] <= 624, "numpy's generator points nowhere")  # type: ignore[operator] # noqa: NPY002
            np.random.random()  # noqa: NPY002
            random.random()
            torch.rand(1)
    finally:
        random.setstate(chance[0])
        np.random.set_state(chance[1])  # noqa: NPY002
        torch.set_rng_state(chance[2])
        # Whatever it took over, also half, must not speak in the next example.
        restore(learner, honest)
        if vars(learner.scheduler) != before:
            a_learner.cache_clear()
    return refused is None


def check_weights(model: bytes) -> None:
    """`w5xde export` writes what it read, or says why not."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Path(folder) / "mine"
        run.mkdir()
        CheckpointStore(RealDisk(run)).save(1, {"model.safetensors": [model]}, honest_facts())
        refusal_of(lambda: export_run(run, "pt", Path(folder) / "out.pt"))


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + data


# --- checkpoints ----------------------------------------------------------------------------------


@lru_cache(1)
def honest_facts() -> dict[str, Any]:
    """What a checkpoint of one step says besides its files."""
    with tempfile.TemporaryDirectory() as folder:
        result = w5xde.train(JOB, nodes=1, steps=1, runs=folder, name="mine", log="silent")
        store = CheckpointStore(RealDisk(result.folder))
        found, _ = store.find_whole()
        require(found is not None, "an honest run left no checkpoint")
        return found.facts  # type: ignore[union-attr]


def disk_with(files: dict[str, bytes]) -> VirtualDisk:
    disk = VirtualDisk(random.Random(0))
    for name, content in files.items():
        folder = ""
        for part in name.split("/")[:-1]:
            folder = f"{folder}/{part}" if folder else part
            if part not in disk.names(folder.rpartition("/")[0]):
                disk.make_folder(folder)
        disk.write(name, [content])
    return disk


def journal_of(disk: Disk) -> Journal:
    """The journal of a life that captures nothing."""
    return Journal(Ledger(disk, lambda: 0.0), lambda: None, keep=3, logs_steps=False)  # type: ignore[arg-type,return-value]


def sealed_manifest(content: bytes) -> bytes:
    return seal(content)[0] + b"\n"


def check_checkpoint(manifest: bytes, files: dict[str, bytes]) -> None:
    """A checkpoint is whole, or damaged with a reason; its facts are facts, or are refused."""
    folder = "checkpoints/step-000000001"
    disk = disk_with({f"{folder}/manifest.json": manifest} | {f"{folder}/{n}": d for n, d in files.items()})
    store = CheckpointStore(disk)
    checkpoint, damaged = store.find_whole()
    require((checkpoint is None) == bool(damaged), "neither whole nor damaged")
    if checkpoint is not None:
        require(set(checkpoint.files) == set(files), "files that are not there")
        refusal_of(lambda: facts_of(checkpoint))
    audit_disk(disk, "mine")
    refusal_of(lambda: restore_run(journal_of(disk), lambda files, life: None, _apply_nothing, "mine"))


def manifest_of(content: dict[str, Any]) -> bytes:
    return sealed_manifest(msgspec.json.encode(content))


def honest_manifest(files: dict[str, bytes]) -> dict[str, Any]:
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()
    }
    return {"format": 1, "version": 1, "files": listed, "facts": honest_facts()}


# --- ledger and step log --------------------------------------------------------------------------


def ledger_of(contents: Iterable[bytes]) -> bytes:
    """A segment whose chain is right, whatever its lines hold."""
    lines, before = [], NOTHING
    for content in contents:
        line, before = seal(content, before)
        lines.append(line + b"\n")
    return b"".join(lines)


def check_ledger(segments: list[bytes]) -> None:
    """Whatever the lines are, an audit counts what it can, and the next life goes on."""
    files = {segment_name(number): data for number, data in enumerate(segments, 1)}
    audit_disk(disk_with(files), "mine")
    ledger = Ledger(disk_with(files), lambda: 0.0)
    ledger.write([{"kind": "start"}])
    ledger.sync()


def check_seal(line: bytes, before: str) -> None:
    refused = refusal_of(lambda: unseal(line, before))
    if refused is None:
        content, _ = unseal(line, before)
        require(seal(content, before)[0] == line, "another line with the same seal")


def logged(header: bytes, body: bytes) -> bytes:
    """A record of the step log whose hash is right, whatever it holds."""
    digest = hashlib.sha256(header + body).digest()
    return struct.pack("<4sIQ32s", b"w5sl", len(header), len(body), digest) + header + body


def check_step_log(data: bytes) -> None:
    """Steps are applied again as far as they are whole, or a sentence says why not."""
    disk = disk_with({"steps-1-1-000000000.log": data})
    refusal_of(lambda: restore_run(journal_of(disk), _load_nothing, _apply_nothing, "mine"))


def _load_nothing(files: dict[str, bytes]) -> None:
    require(not files, "there is no checkpoint")


def _apply_nothing(step: Any, record: dict[str, Any], body: bytes) -> None:
    """A learner looks at the numbers; here only their places matter."""


# --- tickets --------------------------------------------------------------------------------------


@lru_cache(1)
def honest_register() -> bytes:
    """What a register holds of which one ticket was used once."""
    with tempfile.TemporaryDirectory() as folder:
        register = TicketRegister.begin(Path(folder), Entrance((("127.0.0.1", 5555),), "00" * 32))
        ticket = register.new(1e9)
        register.admit_ticket(ticket.id, ticket.secret.reveal(), 1e9, name="apple")
        content, _ = unseal((Path(folder) / "tickets.json").read_bytes()[:-1])
        return content


def check_register(data: bytes) -> None:
    """A register is read and used, or refused; whoever comes is let in or not, and told why not."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tickets.json"
        file.touch(0o600)
        file.write_bytes(data)
        refused = refusal_of(lambda: TicketRegister(Path(folder)))
        if refused is None:
            register = TicketRegister(Path(folder))
            for use in (
                lambda: register.new(1e9),
                lambda: [row.state(1e9) for row in register.tickets()],
                lambda: [register.ban_of(bytes.fromhex(row.id)) for row in register.nodes()],
                lambda: register.admit_ticket(bytes(8), bytes(16), 1e9),
                lambda: register.admit_node(bytes(8), bytes(32)),
            ):
                with suppress(JoinError, UsageError):
                    refusal_of(use)


# --- what a run was started with ------------------------------------------------------------------


def check_run_manifest(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST).write_bytes(data)
        refusal_of(lambda: read_manifest(Path(folder)))
