"""The machines of a run: their nodes, added up to one row for each machine. Knows no terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from w5xde.cli.units import number_text

if TYPE_CHECKING:
    from w5xde.callbacks.status import NodeStatus

GONE = "gone"
_NUMBER = re.compile(r"-[0-9]+$")


@dataclass(frozen=True, slots=True)
class MachineRow:
    """What the nodes of one machine do together, or what one node does."""

    name: str
    device: str
    state: str
    batches_per_second: float
    share: float
    loss: float | None
    computing: float
    waiting: float
    network_per_second: float

    @property
    def is_gone(self) -> bool:
        return self.state == GONE


def machine_rows(nodes: Sequence[NodeStatus], *, each_node: bool = False) -> list[MachineRow]:
    """A row for each machine, or for `each_node`; those that work come first."""
    groups: dict[str, list[NodeStatus]] = {}
    for node in nodes:
        # No machine has this key: the name of a node has no such character.
        alone = each_node or not node.machine
        groups.setdefault(f"\0{node.name}" if alone else node.machine, []).append(node)
    return sorted((_row(group) for group in groups.values()), key=lambda row: row.is_gone)


def machine_count(nodes: Sequence[NodeStatus]) -> int:
    """How many machines have a node that works."""
    return sum(not row.is_gone for row in machine_rows(nodes))


def _row(group: list[NodeStatus]) -> MachineRow:
    # Nodes that left say nothing about how the others compute.
    present = [node for node in group if node.state != GONE] or group
    losses = [node.loss for node in present if node.loss is not None]
    states = {node.state for node in present}
    return MachineRow(
        name=_name(group, len(present)),
        device=_devices([node.device for node in present]),
        state="working" if "working" in states else present[0].state,
        batches_per_second=sum(node.batches_per_second for node in present),
        share=sum(node.share for node in group),
        loss=sum(losses) / len(losses) if losses else None,
        computing=sum(node.computing for node in present) / len(present),
        waiting=sum(node.waiting for node in present) / len(present),
        network_per_second=sum(node.network_per_second for node in present),
    )


def _name(group: list[NodeStatus], present: int) -> str:
    """The name of a single node; for several what their names have in common, and how many they are."""
    if len(group) == 1:
        return group[0].name
    stems = dict.fromkeys(_NUMBER.sub("", node.name) for node in group)
    count = number_text(present, "node") if present == len(group) else f"{present} of {len(group)} nodes"
    return f"{' + '.join(stems)} ({count})"


def _devices(devices: list[str]) -> str:
    found = dict.fromkeys(devices)
    if len(found) == 1:
        return devices[0]
    kinds = dict.fromkeys(device.partition(":")[0] for device in found)
    return f"{len(found)} × {devices[0].partition(':')[0]}" if len(kinds) == 1 else " + ".join(kinds)
