"""The canary: four samples on weights by a formula, which every node computes before its first lease.

The coordinator computes it once. A node returns a sketch of the random numbers that it draws and of its
gradients. If the gradients differ by more than rounding, the node has another model, another precision, or a
device or driver that computes wrongly. If the random numbers differ, its updates cannot be compared with the
coordinator's when the loss draws. Finds mistakes, not lies: a liar computes the canary correctly. Knows no
peers and no messages but the canary's own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import dropout

from w5xde.errors import JoinError, RemoteProtocolError
from w5xde.learn.data.payload import Packer, Unpacker
from w5xde.learn.data.sources import Source
from w5xde.learn.job.job import BatchFailed, describe
from w5xde.learn.model.device import exact_products
from w5xde.learn.model.layout import FlatModel
from w5xde.learn.model.seeding import as_before, torch_seeder
from w5xde.learn.train.trainer import Trainer
from w5xde.learn.trust import canary_weights
from w5xde.learn.trust.sketch import ROW, sketch
from w5xde.message_types import CANARY_BODY_BYTES_MAX, Call
from w5xde.messages import Canary

CODE = "W5-212"
# The part of the canary that travels beside its tensors: the message that holds it has a limit too.
META_BYTES_MAX = 1024 * 1024
FIX = "use the coordinator's job file and versions; look for a cause with w5xde doctor, or try --devices cpu"

SAMPLES = 4
# Relative to a gradient's size, what any machine's rounding may cause: float32 on unlike kernels differs by
# 2e-5 at most, bfloat16 by 2e-3 at least. A run that itself rounds to bfloat16 or float16 allows more.
ROUNDING, ROUNDING_COARSE = 1e-3, 3e-2
# Where a gradient jumps (a ReLU's zero, a maximum) rounding may move it by more: at most twice as far as it
# moves if every weight changes by this fraction of itself. That is a thousand times float32's rounding, an
# eighth of bfloat16's.
NUDGE, NUDGE_COARSE = 2.0**-12, 2.0**-6
NUDGE_FACTOR = 2.0
# A gradient this small relative to all may be nothing but rounding, as that of a bias before a BatchNorm.
SMALL = 1e-3
# With other random numbers (devices draw different ones) a gradient differs, but not in its magnitude.
SIZE_FACTOR = 10.0
# Use the seed of the first batch.
_KEY = (0, 0)
# A canary that takes longer is not computed a second time to measure its speed without warm-up.
_AGAIN_SECONDS = 20.0


class NoCanary(Exception):
    """This job cannot have a canary; the text says why."""


@dataclass(slots=True)
class CanaryAnswer:
    """Sketches in rows: of the random numbers drawn, then of each trained parameter's gradient.

    `seconds` is how long the gradients took, or 0 if that is not known.
    """

    rows: Tensor
    seconds: float

    @property
    def body(self) -> memoryview:
        return self.rows.view(-1).view(torch.uint8).numpy().data


def compute_canary(trainer: Trainer, canary: Canary, body: bytearray | memoryview) -> CanaryAnswer:
    """Compute the canary on a node. Afterwards the model is unusable until a whole version is loaded."""
    try:
        given = _compute(trainer, canary, body)
        if given.seconds < _AGAIN_SECONDS:
            return _compute(trainer, canary, body)
        # Drivers and compilers make the first batch slow: its time says nothing about the next.
        return CanaryAnswer(given.rows, 0.0)
    except BatchFailed as error:
        what = f"a first small batch cannot be computed here, as the coordinator could: {error}"
        raise JoinError(what, code=CODE, fix=FIX) from error


def _compute(
    trainer: Trainer, canary: Canary, body: bytearray | memoryview, nudge: float = 0.0
) -> CanaryAnswer:
    blueprint = trainer.blueprint
    buffers = slice(blueprint.trained_bytes, blueprint.moving_bytes)
    buffers_bytes = buffers.stop - buffers.start
    if not canary_weights.fits(canary.fills, blueprint.layout) or len(body) < buffers_bytes:
        raise RemoteProtocolError("a canary that does not fit its layout", code="W5-120")
    batch = Unpacker(body, trainer.types).unpack(canary.item, buffers_bytes)
    trainer.take_call(canary.call)

    def write(flat: FlatModel) -> None:
        canary_weights.write(flat, canary.fills, nudge=nudge)
        if buffers_bytes:
            flat.state[buffers].copy_(torch.frombuffer(body, dtype=torch.uint8, count=buffers_bytes))

    with as_before(), exact_products(trainer.device):
        trainer.fill(write)
        begun = time.perf_counter()
        rows = [sketch(gradient) for gradient in trainer.gradients(batch, _KEY)]
        seconds = time.perf_counter() - begun
        return CanaryAnswer(torch.stack([_sketch_draws(trainer.device), *rows]), seconds)


def _sketch_draws(device: torch.device) -> Tensor:
    """Return a sketch of the random numbers that this device draws under one seed."""
    torch_seeder(device)(0)
    return sketch(torch.cat([dropout(torch.ones(256, device=device)), torch.randn(256, device=device)]))


class ExpectedCanary:
    """The canary of a run, and the answer that the coordinator computed for it."""

    def __init__(
        self,
        trainer: Trainer,
        flat: FlatModel,
        source: Source,
        *,
        draws: bool,
        is_coarse: bool,
        call: Call | None = None,
    ) -> None:
        """Compute the canary on a model that is unusable afterwards; raises `NoCanary`.

        `draws`: the loss draws from torch's generator. `is_coarse`: the run rounds to bfloat16 or float16.
        `call`: in a pool, how it is computed.
        """
        packer, blueprint = Packer(source.recipe.types), flat.blueprint
        buffers = flat.state[blueprint.trained_bytes : blueprint.moving_bytes].numpy().tobytes()
        try:
            self.message = Canary(canary_weights.fills_of(flat), packer.pack(source.first(SAMPLES)), call)
            self.body = bytearray(b"".join([buffers, *packer.pieces]))
            if len(self.body) > CANARY_BODY_BYTES_MAX:
                raise NoCanary(f"{SAMPLES} samples and the model's buffers take {len(self.body)} bytes")
            words = len(msgspec.msgpack.encode(self.message))
            if words > META_BYTES_MAX:
                raise NoCanary(f"{SAMPLES} samples take {words} bytes beside their tensors")
            given = _compute(trainer, self.message, self.body)
            nudged = _compute(trainer, self.message, self.body, NUDGE_COARSE if is_coarse else NUDGE)
        except (BatchFailed, NoCanary) as error:
            raise NoCanary(str(error)) from error
        except Exception as error:
            raise NoCanary(describe(error)) from error
        self._rows, self._loss_draws = given.rows, draws
        # The faster of two: the first includes what happens only once.
        self.seconds = min(given.seconds, nudged.seconds)
        self._names = [blueprint.layout.entries[i].name for i in blueprint.trained]
        self._sizes = given.rows[1:, 0]
        total = float(self._sizes.norm())
        if not 0 < total < float("inf"):
            raise NoCanary(f"the gradient of {SAMPLES} samples on weights by a formula has norm {total}")
        self._sizes = self._sizes.clamp(min=SMALL * total)
        # How much each gradient may differ, relative to its size.
        moved = self._differences(nudged.rows)
        self._limits = (NUDGE_FACTOR * moved).clamp(min=ROUNDING_COARSE if is_coarse else ROUNDING)

    @property
    def answer_bytes(self) -> int:
        return self._rows.nbytes

    def draws_alike(self, body: bytearray | memoryview) -> bool:
        """Return whether the loss draws nothing, or a node with this answer draws the same as we do."""
        row = _rows_of(body)[0]
        return not self._loss_draws or torch.allclose(self._rows[0], row, rtol=ROUNDING, atol=ROUNDING)

    def find_mismatch(self, body: bytearray | memoryview) -> str:
        """Return what is wrong with an answer of the right length, or an empty string."""
        given = _rows_of(body)
        if not self.draws_alike(body):
            return self._find_other_size(given)
        differences = self._differences(given)
        # An infinite limit makes the ratio NaN: treat it as no evidence.
        excess = (differences / self._limits).nan_to_num(0.0)
        at = int(excess.argmax())
        if excess[at] <= 1:
            return ""
        return (
            f"the gradient of {self._names[at]} differs by about {float(differences[at]):.2g} of its size"
            f" ({float(self._limits[at]):.2g} may be rounding), and {self._others(excess > 1)}"
        )

    def _find_other_size(self, given: Tensor) -> str:
        """Compare only the sizes of gradients: the node draws other random numbers."""
        times = given[1:, 0].clamp(min=0).nan_to_num(torch.inf) / self._sizes
        times = times.clamp(min=SMALL)
        # The size of a gradient that is small here is a lower bound: the node's may be smaller.
        is_small = self._rows[1:, 0] < self._sizes
        factors = torch.where(is_small, times, torch.maximum(times, 1 / times))
        at = int(factors.argmax())
        if factors[at] <= SIZE_FACTOR:
            return ""
        return (
            f"the gradient of {self._names[at]} is {float(times[at]):.2g} times as large as it should be,"
            f" and {self._others(factors > SIZE_FACTOR)}"
        )

    def _others(self, wrong: Tensor) -> str:
        return f"{int(wrong.sum()) - 1} of the other {len(self._names) - 1} differ too"

    def _differences(self, rows: Tensor) -> Tensor:
        """Return how much each gradient differs from ours, relative to its size."""
        gaps = rows[1:] - self._rows[1:]
        largest = torch.maximum(gaps[:, 1:].norm(dim=1), gaps[:, 0].abs())
        return largest.nan_to_num(torch.inf, torch.inf) / self._sizes


def _rows_of(body: bytearray | memoryview) -> Tensor:
    return torch.frombuffer(body, dtype=torch.float64).view(-1, ROW)
