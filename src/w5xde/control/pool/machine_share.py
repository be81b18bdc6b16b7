"""How many nodes one machine runs: by its GPUs, else by its cores; and not more than its memory has room for.

Pure arithmetic on what others have measured. Knows no processes, and devices by their names alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CPU = "cpu"
# If all nodes have room with this much and this many copies of the model each, none is weighed first. The
# copies: parameters, gradients, an update on its way, the canary's model, and an optimizer's state.
ROOMY_BYTES = 2**30
ROOMY_COPIES = 8
# A node may take more for a later batch than it took for its first.
WEIGHED_MARGIN = 1.25
# Left to everything else on the machine.
SPARE_BYTES = 2**28


def devices_of_nodes(devices: Sequence[str], cores: int, threads: int, count: int | None) -> list[str]:
    """The device of each node: one node for each GPU, and for the CPU one for every `threads` cores.

    With a `count`, that many nodes in turn on these devices.
    """
    if count is not None:
        return [devices[number % len(devices)] for number in range(count)]
    gpus = [device for device in devices if device != CPU]
    if CPU not in devices:
        return gpus
    # A node on a GPU needs a core too.
    return [*gpus, *[CPU] * max(1, cores // threads - len(gpus))]


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a machine on which one node runs already, or is about to start."""

    # Of the model's parameters and buffers.
    state_bytes: int
    left_bytes: int

    def is_ample(self, nodes: int) -> bool:
        """Whether so many nodes have room whatever their batches take, within reason."""
        return nodes * (ROOMY_BYTES + ROOMY_COPIES * self.state_bytes) <= self.left_bytes - SPARE_BYTES

    def nodes(self, wanted: int, node_bytes: int) -> int:
        """How many of the wanted nodes have room, if the one that runs takes `node_bytes`."""
        each = max(1, int(node_bytes * WEIGHED_MARGIN))
        return min(wanted, 1 + max(0, self.left_bytes - SPARE_BYTES) // each)
