"""The stages, studies and reported figures of the first system as data, and the settings that stand for them.

A fixed codec is always applied. `auto` never encodes a payload that fits a few packets, and this model does:
so stages that compressed only large payloads compress nothing here, as they should.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KB, MB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """The first system's figures for a stage, over 30 s with ten nodes. None: not reported."""

    batches: int | None = None
    batches_per_second: float | None = None
    bytes_per_second: float | None = None
    seconds_network: tuple[float, float] | None = None
    memory_bytes: float | None = None
    compression_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class StudyStage:
    """A stage: its description, what stands for it here, the settings for that, and its reported figures."""

    name: str
    about: str
    note: str
    settings: dict[str, Any] = field(default_factory=dict)
    then: Figures = field(default_factory=Figures)


# Everything went over TCP then.
TCP = {"road": "tcp"}
_PICKLES = "gradients and parameters as pickled lists of floats"

# In the first system's order. Its messages were pickles until the last stage, which sent tensors as they are.
STAGES: tuple[StudyStage, ...] = (
    StudyStage(
        "early",
        "512 KB buffers, pickles, no compression, chatty logging",
        f"{_PICKLES}; a view that shows everything, drawn into memory",
        TCP | {"socket_buffer": 512 * KB, "compress": "pickled", "log": "verbose"},
        Figures(2_733, 91, 326e3, (24, 24), 709.11e6, None),
    ),
    StudyStage(
        "standard",
        "pickle and zlib, 4 MB buffers",
        f"{_PICKLES}, through zlib at its fastest",
        TCP | {"socket_buffer": 4 * MB, "compress": "pickled | zlib:1"},
        Figures(13_764, 459, 1.67e6, (14, 14), 755.39e6, 1.88),
    ),
    StudyStage(
        "gradient compression",
        "the same, compressed harder",
        f"{_PICKLES}, through zlib at its smallest",
        TCP | {"socket_buffer": 4 * MB, "compress": "pickled | zlib:9"},
        Figures(10_339, 344, 834.88e3, (12.7, 12.7), 804.97e6, 2.02),
    ),
    StudyStage(
        "adaptive",
        "compression only where it pays, 8 MB buffers",
        "auto stands for its threshold: what is measured to be sooner raw goes raw, like all of this model",
        TCP | {"socket_buffer": 8 * MB, "compress": "auto"},
        Figures(17_151, 572, 2.90e6, (10.40, 12.15), 767.87e6, 1.35),
    ),
    StudyStage(
        "enhanced",
        "16 MB buffers, compression only above 512 KB",
        "auto stands for its threshold, too: here the link's speed decides, not a number of bytes",
        TCP | {"socket_buffer": 16 * MB, "compress": "auto"},
        Figures(17_244, 575, 2.93e6, (10.37, 11.79), 767e6, 1.34),
    ),
    StudyStage(
        "LZ4 frame",
        "pickles in LZ4 frames",
        f"{_PICKLES}, each an LZ4 frame, whatever its size",
        TCP | {"socket_buffer": 16 * MB, "compress": "pickled | lz4frame"},
        Figures(17_198, 573, 2.93e6, None, 767e6, 1.32),
    ),
    StudyStage(
        "LZ4 block",
        "pickles in LZ4 blocks",
        f"{_PICKLES}, each an LZ4 block, whatever its size",
        TCP | {"socket_buffer": 16 * MB, "compress": "pickled | lz4"},
        Figures(17_305, 577, 3.02e6, (10.54, 12.05), 767e6, 1.30),
    ),
    StudyStage(
        "direct tensors",
        "tensors as they are, LZ4 blocks",
        "the vectors of this version, each an LZ4 block, whatever its size",
        TCP | {"socket_buffer": 16 * MB, "compress": "lz4"},
        Figures(24_373, 812, 4.11e6, (12.81, 13.99), 767e6, 1.24),
    ),
    StudyStage("today", "the defaults of this version", "not one setting"),
)

BUFFERS: tuple[StudyStage, ...] = tuple(
    StudyStage(
        f"{size} MB",
        f"socket buffers of {size} MB",
        "today's defaults over TCP, with buffers as large as the system lets them be",
        TCP | {"socket_buffer": size * MB},
        then,
    )
    for size, then in (
        (1, Figures(bytes_per_second=1.2e6)),
        (4, Figures(bytes_per_second=1.67e6)),
        (8, Figures(bytes_per_second=2.90e6)),
        # "No additional benefit".
        (16, Figures(bytes_per_second=2.90e6)),
    )
)

_VIEW = "today's defaults, and the view of a terminal that is not there"
LOGGING: tuple[StudyStage, ...] = (
    StudyStage("verbose", "shows everything", _VIEW, {"log": "verbose"}, Figures(bytes_per_second=1.67e6)),
    StudyStage("normal", "a line now and then", _VIEW, {"log": "normal"}, Figures(bytes_per_second=2.90e6)),
    StudyStage("silent", "shows nothing", _VIEW, {"log": "silent"}, Figures(bytes_per_second=2.90e6)),
)

STUDIES: dict[str, tuple[StudyStage, ...]] = {"stages": STAGES, "buffers": BUFFERS, "logging": LOGGING}
