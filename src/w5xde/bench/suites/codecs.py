"""`bench codecs`: ratio and speed of each codec on real gradients.

The gradients are those of the digits and the text example after some steps, and of a larger text model:
random numbers would compress worse, and gradients of an untrained model better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

    from w5xde.learn.model.layout import DtypeGroup

SPECS = (
    "none",
    "zlib:1",
    "zlib:6",
    "lz4",
    "lz4:8",
    "lz4frame",
    "zstd:1",
    "zstd:3",
    "shuffle | zlib:1",
    "shuffle | lz4",
    "shuffle | zstd:1",
    "bf16",
    "fp16",
    "int8",
    "bf16 | shuffle | zstd:1",
    "int8 | zstd:1",
)
STEPS = 20


class Payload(NamedTuple):
    """A gradient with its layout, as a node would send it."""

    name: str
    raw: Tensor
    groups: list[DtypeGroup]


def measure(seconds: float) -> dict[str, Any]:
    """Measure every codec on every payload for about `seconds`, after some training.

    Each row has `codec`, `data`, `raw_bytes`, `encoded_bytes`, `ratio` (raw over encoded, as the first system
    had it), `encode_bytes_per_second` and `decode_bytes_per_second`, counted in raw bytes, the best of as
    many runs as there is time for. The row of `none` is a copy of memory each way, for comparison: w5xde
    itself sends such a vector without copying it.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as nodes do
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            payloads = list(_payloads())
        share = seconds / (2 * len(payloads) * len(SPECS))
        rows = [_row(payload, spec, share) for payload in payloads for spec in SPECS]
    finally:
        torch.set_num_threads(threads)
    largest = max((row for row in rows if row["codec"] == "none"), key=lambda row: int(row["raw_bytes"]))
    return {"rows": rows, "memcpy_bytes_per_second": largest["encode_bytes_per_second"]}


def _row(payload: Payload, spec: str, seconds: float) -> dict[str, Any]:
    import torch

    from w5xde.learn.codecs.pipeline import parse

    name, raw, groups = payload
    pipeline = parse(spec)
    target = torch.zeros_like(raw)
    body = bytearray().join(pipeline.encode(raw, groups))
    if spec == "none":
        encode_seconds = _best(lambda: target.copy_(raw), seconds)
    else:
        encode_seconds = _best(lambda: pipeline.encode(raw, groups), seconds)
    return {
        "codec": pipeline.spec,
        "data": name,
        "raw_bytes": raw.numel(),
        "encoded_bytes": len(body),
        "ratio": raw.numel() / len(body),
        "encode_bytes_per_second": raw.numel() / encode_seconds,
        "decode_bytes_per_second": raw.numel()
        / _best(lambda: pipeline.decode(body, target, groups), seconds),
    }


def _best(work: Callable[[], object], seconds: float) -> float:
    """The seconds of the fastest of as many calls as fit, at least one."""
    best = float("inf")
    until = time.perf_counter() + seconds
    while True:
        begun = time.perf_counter()
        work()
        done = time.perf_counter()
        best = min(best, done - begun)
        if done >= until:
            return best


def _payloads() -> Iterator[Payload]:
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    from w5xde.bench import jobs
    from w5xde.datasets import digits

    images, labels = digits().tensors
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def digits_loss(model: nn.Module) -> Tensor:
        chosen = torch.randint(len(images), (32,))
        return cross_entropy(model(images[chosen]), labels[chosen])

    yield _trained("digits", model, digits_loss)

    windows = jobs.text_data()

    def text_loss(model: nn.Module) -> Tensor:
        chosen = torch.randint(len(windows), (16,))
        return jobs.guess_next(model, torch.stack([windows[int(at)] for at in chosen]))

    yield _trained("text", jobs.Writer(96), text_loss)
    yield _trained("text, large", jobs.Writer(200), text_loss)


def _trained(name: str, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Payload:
    """The last gradient of some steps, in the layout of an update."""
    import torch

    from w5xde.learn.model.layout import Blueprint, describe

    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    blueprint = Blueprint(describe(model, set()))
    vector = blueprint.new_vector()
    vector.raw.zero_()
    [part] = vector.parts
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    part.copy_(torch.cat([gradient.flatten() for gradient in gradients]))
    return Payload(name, vector.raw, blueprint.moving_groups)
