"""Settings of engines: which cluster places the processes of a run, how many nodes, and what each needs.

    --nodes 8        eight nodes
    --nodes 2..16    two, and up to sixteen while the cluster has room for them
    --nodes auto     as many as fit

Knows no cluster and no other settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from w5xde.specs.setting_error import SettingError

LOCAL = "local"
AUTO = "auto"
# More processes than that need more than one coordinator can serve.
NODES_MAX = 1000
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_LABEL = re.compile(r"([A-Za-z0-9][\w./-]{0,316})=([\w.!()-][\w.!(),-]{0,62})?")

Engine = Annotated[
    Literal["local", "ray"],
    Meta(
        description="which system places the processes of the run, and starts them again when they die."
        " local: this machine; ray: the Ray cluster that RAY_ADDRESS names, or that this machine belongs to"
    ),
]
Nodes = Annotated[
    int | str,
    Meta(
        description="node processes to start on this machine, or with an engine on its cluster. auto: one for"
        " each GPU, else one for every `threads` cores, and not more than memory has room for. With an engine"
        " also MIN..MAX: those beyond MIN come and go with the room that the cluster has"
    ),
]
CpusPerNode = Annotated[
    Annotated[float, Meta(gt=0)] | None,
    Meta(description="with an engine: cores that each node needs (default: as many as `threads`)"),
]
GpusPerNode = Annotated[float, Meta(ge=0, description="with an engine: GPUs that each node needs")]
Labels = Annotated[
    str | None,
    Meta(
        description="with an engine: labels that hosts of nodes must have, as key=value with commas, for"
        " example ray.io/market-type=spot"
    ),
]


@dataclass(frozen=True, slots=True)
class NodeRange:
    """How many nodes a run has on a cluster: at least, and at most."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}..{self.most}"


def node_range(nodes: int | str) -> NodeRange | None:
    """The range that the setting `nodes` means; None for `auto`. ValueError if it means nothing."""
    if nodes == AUTO:
        return None
    found = _RANGE.fullmatch(nodes) if isinstance(nodes, str) else None
    if isinstance(nodes, str) and found is None:
        raise ValueError(f"nodes {nodes!r} must be a whole number, a range like 2..16, or auto")
    least, most = (int(found[1]), int(found[2])) if found is not None else (int(nodes), int(nodes))
    if not 0 <= least <= NODES_MAX or not 0 <= most <= NODES_MAX:
        raise ValueError(f"nodes {nodes} must be from 0 to {NODES_MAX} or auto")
    if least > most:
        raise SettingError(f"nodes {nodes} is an empty range", fix=f"turn it round: {most}..{least}")
    return NodeRange(least, most)


def is_range(nodes: object) -> bool:
    """Whether a value of `nodes` is a range."""
    return isinstance(nodes, str) and _RANGE.fullmatch(nodes) is not None


def parse_labels(text: str | None) -> dict[str, str]:
    """The labels that the setting `labels` asks for; ValueError if a part is no label."""
    found: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        label = _LABEL.fullmatch(part.strip())
        if label is None:
            raise ValueError(f"labels {part.strip()!r} must be like key=value, with commas between several")
        found[label[1]] = label[2] or ""
    return found


def require_engine(
    engine: str, nodes: int | str, labels: str | None, cpus: float | None, gpus: float
) -> None:
    """Refuse settings of engines that make no sense; ValueError."""
    wanted = node_range(nodes)
    parse_labels(labels)
    if engine != LOCAL:
        if wanted is not None and wanted.most == 0:
            raise SettingError(
                "nodes 0 on a cluster would train nothing", fix="give at least 1, a range like 0..8, or auto"
            )
        return
    if isinstance(nodes, str) and nodes != AUTO:
        raise SettingError(
            f"nodes {nodes} is a range, which needs an engine that finds room for more nodes",
            fix="give one number, or add engine ray",
        )
    for name, value in {"cpus-per-node": cpus, "gpus-per-node": gpus, "labels": labels}.items():
        if value:
            raise SettingError(
                f"{name} {value} is for engines that choose hosts, and the engine is local",
                fix="leave it out, or add engine ray",
            )
