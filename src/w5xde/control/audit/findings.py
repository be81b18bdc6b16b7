"""The findings of an audit: plain data, for views and for --json."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class NodeShare:
    """One node's share of the steps that count, and the fate of its leases."""

    batches: int = 0
    samples: int = 0
    leases: int = 0
    refused: int = 0
    # Leases that ended without an answer.
    expired: int = 0


@dataclass(slots=True)
class Findings:
    """The counts, violations and remarks that follow from a ledger."""

    records: int = 0
    lives: int = 0
    # The number of the last life.
    life: int = 0
    crashes: int = 0
    steps: int = 0
    batches: int = 0
    samples: int = 0
    epochs: int = 0
    steps_redone: int = 0
    durable_version: int = 0
    ended: str = ""
    nodes: dict[str, NodeShare] = field(default_factory=dict)
    aside: list[tuple[int, int]] = field(default_factory=list)
    # Version -> sha256, of every checkpoint that was reported durable.
    checkpoints: dict[int, str] = field(default_factory=dict)
    # The sha256 of every model.safetensors that was saved -> after how many steps.
    models: dict[str, int] = field(default_factory=dict)
    # The same of every best.safetensors.
    best: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def node(self, name: str) -> NodeShare:
        return self.nodes.setdefault(name, NodeShare())
