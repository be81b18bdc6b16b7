"""The route of a model's vectors, chosen by their size: the one place that says what is large.

Knows sizes only: no tensors, sockets or settings.
"""

from __future__ import annotations

from dataclasses import dataclass

# From this size on a copy of a vector costs more than a system call. Below it the learner works on the event
# loop: handing a vector to a thread and back would cost more than most steps.
LARGE_BYTES_MIN = 1024 * 1024
# From this size on memory is used again: the allocator gives a freed block of this size back to the system,
# which fills a new one with zeros, page by page.
REUSED_BYTES_MIN = 64 * 1024
# From this size on local nodes and the coordinator share memory. A socket carries a smaller vector in one
# system call, and several of them in one frame.
SHARED_BYTES_MIN = 64 * 1024
# From this size on a checkpoint is written from the learner's own memory, and the next step waits for that:
# a copy of parameters and optimizer state would take as long, and as much memory again. Below it a copy is
# cheap, and then no step waits for the disk.
SAVED_IN_PLACE_BYTES_MIN = 16 * 1024 * 1024
# From this size on a local node reads the parameters where the coordinator has them. Smaller ones it copies:
# that takes 2 ms at most, and recorded batches, which only small models have, need weights that stand still.
VIEWED_BYTES_MIN = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class VectorRoute:
    """Which way vectors of this many bytes go.

    *Inline* (small): the learner runs on the event loop. *Large*: it runs on a thread of its own, the vectors
    of updates enter one at a time and are checked while they arrive, a node holds one lease, and the learner
    makes no copy of its state to roll a step back. Inside one machine vectors are *shared* in memory, also
    many small ones, and the parameters of the largest models are *viewed* there instead of copied.
    """

    vector_bytes: int

    @property
    def is_large(self) -> bool:
        return is_large(self.vector_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether local nodes write their vectors into memory that the coordinator reads."""
        return self.vector_bytes >= SHARED_BYTES_MIN

    @property
    def is_viewed(self) -> bool:
        """Whether local nodes compute on the coordinator's own parameters, without a copy."""
        return self.vector_bytes >= VIEWED_BYTES_MIN

    @property
    def is_saved_in_place(self) -> bool:
        return self.vector_bytes >= SAVED_IN_PLACE_BYTES_MIN


def is_large(byte_count: int) -> bool:
    """Whether a vector, or the body of a frame with several, has so many bytes that copying it is costly."""
    return byte_count >= LARGE_BYTES_MIN
