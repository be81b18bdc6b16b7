"""The settings of data: what they may be, with their help texts. Knows no other settings.

Those that a job's DataLoader decides, if the user gives none, are None then.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

# Where neither a setting nor the job's DataLoader says how many samples a batch has.
BATCH_SAMPLES = 32

BatchSize = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    Meta(
        description="samples in a batch (default: that of the job's DataLoader, else 32). A step has"
        " batch-size × batches-per-step of them: 32 × 2 = 64 by default in sync mode"
    ),
]
Shuffle = Annotated[
    bool | None,
    Meta(description="a new order of samples in each epoch (default: as in the job's DataLoader, else on)"),
]
DropLast = Annotated[
    bool | None,
    Meta(
        description="leave out the last batch of an epoch if it is not full (default: as in the job's"
        " DataLoader, else off)"
    ),
]
DataMode = Annotated[
    Literal["stream", "cached", "local", "auto"],
    Meta(
        description="stream: the coordinator sends batches; cached: it sends each sample once, and nodes"
        " keep it in a file; local: each node reads its own copy; auto: cached for nodes that join, if"
        " that saves traffic, else stream"
    ),
]
CacheBytes = Annotated[
    int,
    Meta(
        ge=0, le=2**50, description="bytes of samples that the nodes of this machine keep in files (0: none)"
    ),
]
LoaderWorkers = Annotated[
    Annotated[int, Meta(ge=0, le=64)] | None,
    Meta(
        description="processes that read batches ahead, of the coordinator, or with data local of each node"
        " (default: as many as in the job's DataLoader, else 0: none but the process itself)"
    ),
]
