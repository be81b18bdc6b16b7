"""The canary: a small batch on weights by a formula, which every node computes before it is lent anything.

The coordinator has computed it once. A node gives a sketch of its gradients, and where that differs by more
than rounding, something there is not what it is here: the model, the device, its driver or its precision.
This finds mistakes, not lies: who lies computes the canary well.
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
from w5xde.learn.trust import canary_weights as formula
from w5xde.learn.trust.sketch import ROW, sketch
from w5xde.messages import CANARY_BODY_BYTES_MAX, Canary

CODE = "W5-212"
# What of the canary travels with the layout, in a message that is limited.
META_BYTES_MAX = 1024 * 1024
FIX = (
    "use the coordinator's job file and versions; look at this machine with w5xde doctor, or try --device cpu"
)

SAMPLES = 4
# Relative to a gradient's size, what is rounding whoever computes: float32 on unlike kernels gives 2e-5 at
# most, bfloat16 2e-3 at least. If the run itself rounds to bfloat16 or float16, more is.
ROUNDING, ROUNDING_COARSE = 1e-3, 3e-2
# Where a gradient jumps (a ReLU's zero, a maximum) rounding may move it by more: at most by twice what it
# moves if every weight does by this part of itself. A thousand times float32's rounding, an eighth of
# bfloat16's.
NUDGE, NUDGE_COARSE = 2.0**-12, 2.0**-6
NUDGE_FACTOR = 2.0
# A gradient this small beside the others may be nothing but rounding: of a bias before a BatchNorm, it is.
SMALL = 1e-3
# With other random numbers (devices draw different ones) a gradient is another, but not of another size.
SIZE_FACTOR = 10.0
# The batch whose seed is used: the first.
_KEY = (0, 0)
# A canary that takes longer is not computed again to see what it takes when everything is warm.
_AGAIN_SECONDS = 20.0


class Unprovable(Exception):
    """This job has no canary; the text says why."""


@dataclass(slots=True)
class Answer:
    """A sketch of the random numbers that are drawn and one of each trained parameter's gradient, in rows;
    and what the gradients took, 0 if that is not known."""

    rows: Tensor
    seconds: float

    @property
    def body(self) -> memoryview:
        return self.rows.view(-1).view(torch.uint8).numpy().data


def answer(trainer: Trainer, canary: Canary, body: bytearray | memoryview) -> Answer:
    """Compute the canary on a node. The model is of no use afterwards until a whole version is loaded."""
    try:
        given = _compute(trainer, canary, body)
        if given.seconds < _AGAIN_SECONDS:
            return _compute(trainer, canary, body)
        # Drivers and compilers take their time at first: that says nothing about the next batch.
        return Answer(given.rows, 0.0)
    except BatchFailed as error:
        what = f"a first small batch cannot be computed here, as the coordinator could: {error}"
        raise JoinError(what, code=CODE, fix=FIX) from error


def _compute(trainer: Trainer, canary: Canary, body: bytearray | memoryview, nudge: float = 0.0) -> Answer:
    blueprint = trainer.blueprint
    buffers = slice(blueprint.trained_bytes, blueprint.moving_bytes)
    buffers_bytes = buffers.stop - buffers.start
    if not formula.fits(canary.fills, blueprint.layout) or len(body) < buffers_bytes:
        raise RemoteProtocolError("a canary that does not fit its layout", code="W5-120")
    batch = Unpacker(body).unpack(canary.item, buffers_bytes)

    def write(flat: FlatModel) -> None:
        formula.write(flat, canary.fills, nudge=nudge)
        if buffers_bytes:
            flat.state[buffers].copy_(torch.frombuffer(body, dtype=torch.uint8, count=buffers_bytes))

    with as_before(), exact_products(trainer.device):
        trainer.fill(write)
        begun = time.perf_counter()
        rows = [sketch(gradient) for gradient in trainer.gradients(batch, _KEY)]
        seconds = time.perf_counter() - begun
        return Answer(torch.stack([_draws(trainer.device), *rows]), seconds)


def _draws(device: torch.device) -> Tensor:
    """Random numbers as this device draws them under one seed, sketched."""
    torch_seeder(device)(0)
    return sketch(torch.cat([dropout(torch.ones(256, device=device)), torch.randn(256, device=device)]))


class Expectation:
    """The canary of a run, and what must come of it."""

    def __init__(
        self, trainer: Trainer, flat: FlatModel, source: Source, *, draws: bool, is_coarse: bool
    ) -> None:
        """Compute it on the trainer of a model that is of no use afterwards; raises `Unprovable`.

        `draws`: the loss draws from torch's generator. `is_coarse`: the run rounds to bfloat16 or float16.
        """
        packer, blueprint = Packer(), flat.blueprint
        buffers = flat.state[blueprint.trained_bytes : blueprint.moving_bytes].numpy().tobytes()
        try:
            self.message = Canary(formula.fills_of(flat), packer.pack(source.first(SAMPLES)))
            self.body = bytearray(b"".join([buffers, *packer.pieces]))
            if len(self.body) > CANARY_BODY_BYTES_MAX:
                raise Unprovable(f"{SAMPLES} samples and the model's buffers take {len(self.body)} bytes")
            words = len(msgspec.msgpack.encode(self.message))
            if words > META_BYTES_MAX:
                raise Unprovable(f"{SAMPLES} samples take {words} bytes beside their tensors")
            given = _compute(trainer, self.message, self.body)
            nudged = _compute(trainer, self.message, self.body, NUDGE_COARSE if is_coarse else NUDGE)
        except (BatchFailed, Unprovable) as error:
            raise Unprovable(str(error)) from error
        except Exception as error:
            raise Unprovable(describe(error)) from error
        self._rows, self._draws = given.rows, draws
        # What the gradients took here: the first time everything is still cold.
        self.seconds = min(given.seconds, nudged.seconds)
        self._names = [blueprint.layout.entries[i].name for i in blueprint.trained]
        self._sizes = given.rows[1:, 0]
        total = float(self._sizes.norm())
        if not 0 < total < float("inf"):
            raise Unprovable(f"the gradient of {SAMPLES} samples on weights by a formula has norm {total}")
        self._sizes = self._sizes.clamp(min=SMALL * total)
        # How much each gradient may differ, in parts of its size.
        moved = self._differences(nudged.rows)
        self._limits = (NUDGE_FACTOR * moved).clamp(min=ROUNDING_COARSE if is_coarse else ROUNDING)

    @property
    def answer_bytes(self) -> int:
        return self._rows.nbytes

    def wrong_with(self, body: bytearray | memoryview) -> str:
        """What is wrong with an answer of the right length; nothing if it is right."""
        given = torch.frombuffer(body, dtype=torch.float64).view(-1, ROW)
        if self._draws and not torch.allclose(self._rows[0], given[0], rtol=ROUNDING, atol=ROUNDING):
            return self._wrong_sizes(given)
        differences = self._differences(given)
        # If even the nudge made it endless, it says nothing whatever it is.
        excess = (differences / self._limits).nan_to_num(0.0)
        at = int(excess.argmax())
        if excess[at] <= 1:
            return ""
        return (
            f"the gradient of {self._names[at]} differs by about {float(differences[at]):.2g} of its size"
            f" ({float(self._limits[at]):.2g} may be rounding), and {self._others(excess > 1)}"
        )

    def _wrong_sizes(self, given: Tensor) -> str:
        """Whether at least the sizes are alike: other random numbers were drawn there."""
        times = given[1:, 0].clamp(min=0).nan_to_num(torch.inf) / self._sizes
        times = times.clamp(min=SMALL)
        # A gradient that is small here has no size of its own.
        is_small = self._rows[1:, 0] < self._sizes
        apart = torch.where(is_small, times, torch.maximum(times, 1 / times))
        at = int(apart.argmax())
        if apart[at] <= SIZE_FACTOR:
            return ""
        return (
            f"the gradient of {self._names[at]} is {float(times[at]):.2g} times as large as it should be,"
            f" and {self._others(apart > SIZE_FACTOR)}"
        )

    def _others(self, wrong: Tensor) -> str:
        return f"{int(wrong.sum()) - 1} of the other {len(self._names) - 1} differ too"

    def _differences(self, rows: Tensor) -> Tensor:
        """Of each gradient how much it differs from ours, in parts of its size."""
        apart = rows[1:] - self._rows[1:]
        far = torch.maximum(apart[:, 1:].norm(dim=1), apart[:, 0].abs())
        return far.nan_to_num(torch.inf, torch.inf) / self._sizes
