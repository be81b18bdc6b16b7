"""The contestants on slow links: their names, their settings and their learning rates. Loads no torch.

    ddp, ddp-bf16             PyTorch DDP over gloo, with gradients of 32 or 16 bits
    powersgd-1, -2, -4        DDP with PyTorch's PowerSGD hook, of this rank
    local-8, -32              PyTorch's post-local SGD, a mean every so many steps
    diloco-20, -50, -100      DiLoCo over gloo, an outer step every so many steps
    average-20, -50, -100     the same loop with plain averages
    torchft-20, -50, -100     torchft's DiLoCo, if it is installed
    ours-…                    w5xde, with the coordinator on a host of its own

A name may be followed by a learning rate (`diloco-50@0.003`), to look for the best one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from w5xde.bench.flags import number, one_of
from w5xde.config import Settings
from w5xde.errors import UsageError

DDP, OURS_SYNC, TORCHFT = "ddp", "ours-sync", "torchft"
PEERS = (
    DDP,
    "ddp-bf16",
    *(f"powersgd-{rank}" for rank in (1, 2, 4)),
    *(f"local-{period}" for period in (8, 32)),
    *(f"diloco-{period}" for period in (20, 50, 100)),
    *(f"average-{period}" for period in (20, 50, 100)),
    *(f"{TORCHFT}-{period}" for period in (20, 50, 100)),
)
# The settings of ours that differ from those of every run on the rig.
OURS: dict[str, dict[str, Any]] = {
    OURS_SYNC: {"mode": "sync", "compress": "shuffle | zstd:1", "scale_for_batch": True},
    "ours-sync-lossy": {"mode": "sync", "compress": "up: int8, down: bf16", "scale_for_batch": True},
    "ours-rounds": {"mode": "rounds"},
    "ours-rounds-auto": {"mode": "rounds", "local_steps": "auto"},
    "ours-rounds-20": {"mode": "rounds", "local_steps": 20},
    "ours-rounds-50": {"mode": "rounds", "local_steps": 50},
    "ours-rounds-20-twice": {"mode": "rounds", "local_steps": 20},
    "ours-rounds-50-twice": {"mode": "rounds", "local_steps": 50},
}
NAMES = (*OURS, *PEERS)
TITLES = {
    "ddp": "DDP, 32 bits",
    "ddp-bf16": "DDP, 16 bits",
    "powersgd": "DDP, PowerSGD of rank {}",
    "local": "post-local SGD, every {} steps",
    "diloco": "DiLoCo, every {} steps",
    "average": "averages, every {} steps",
    TORCHFT: "torchft DiLoCo, every {} steps",
    OURS_SYNC: "w5xde sync, lossless",
    "ours-sync-lossy": "w5xde sync, lossy",
    "ours-rounds": "w5xde rounds, growing",
    "ours-rounds-auto": "w5xde rounds, by the link",
    "ours-rounds-20": "w5xde rounds of 20 steps",
    "ours-rounds-50": "w5xde rounds of 50 steps",
    "ours-rounds-20-twice": "w5xde rounds of 20 steps, two columns a node",
    "ours-rounds-50-twice": "w5xde rounds of 50 steps, two columns a node",
}
# The best rate of a plain loop (see `learn_jobs`), and on two nodes, with one seed each, the one with which
# DDP (of 0.006, 0.0085, 0.012), average-20 and diloco-50 (of 0.003, 0.006) needed the fewest samples. The
# others were not swept.
RATE = 0.006


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contestant, and the learning rate that the user asked for."""

    name: str
    asked_rate: float | None = None

    @property
    def label(self) -> str:
        return self.name if self.asked_rate is None else f"{self.name}@{self.asked_rate:g}"

    @property
    def title(self) -> str:
        family, _, kind = self.name.partition("-")
        title = TITLES.get(self.name) or TITLES[family].format(kind)
        return title if self.asked_rate is None else f"{title}, rate {self.asked_rate:g}"

    @property
    def settings(self) -> dict[str, Any] | None:
        """Settings of ours; None for a peer."""
        return OURS.get(self.name)

    @property
    def columns(self) -> int:
        """The batches a step for each node: with two, a node computes one column while it sends another."""
        return 2 if self.name.endswith("-twice") else 1

    @property
    def learning_rate(self) -> float:
        return RATE if self.asked_rate is None else self.asked_rate

    @property
    def needs_torchft(self) -> bool:
        return self.name.startswith(TORCHFT)

    @property
    def is_known(self) -> bool:
        """Whether this version of w5xde has the mode of the contestant."""
        try:
            msgspec.convert({"mode": (self.settings or {}).get("mode", "sync")}, Settings)
        except msgspec.ValidationError:
            return False
        return True


def entrant(text: str) -> Entrant:
    """The argparse type of a contestant."""
    name, at, rate = text.partition("@")
    return Entrant(one_of(NAMES)(name), number(1e-6, 10.0)(rate) if at else None)


def require_modes(entrants: Iterable[Entrant]) -> None:
    """Refuse contestants whose mode this version of w5xde does not have."""
    for each in entrants:
        if not each.is_known:
            raise UsageError(
                f"{each.name} cannot run: this version of w5xde does not have its mode",
                code="W5-210",
                fix=f"leave out {each.name}",
            )


DEFAULT = tuple(each for each in map(Entrant, NAMES) if each.is_known and not each.needs_torchft)
