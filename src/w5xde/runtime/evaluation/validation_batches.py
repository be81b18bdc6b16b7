"""Reads the batches of a validation set when they are lent. Keeps none: each evaluation reads them again.

Decides nothing, and knows nothing of what is measured in them.
"""

from __future__ import annotations

from collections.abc import Callable

from w5xde.learn.data.payload import Packed, ReadBatch, pack_batch
from w5xde.learn.data.sources import Key
from w5xde.learn.train.validation_set import ValidationSet
from w5xde.runtime.system.actor import Actor

# Reading a batch on the event loop delays everything else by as much.
INLINE_READ_SECONDS = 0.002


class ValidationBatches:
    """Hands out packed validation batches, by their numbers."""

    def __init__(
        self, validation: ValidationSet, failed: Callable[[BaseException], None], *, is_local: bool
    ) -> None:
        """`is_local`: nodes read their own data, and are sent the numbers of samples."""
        self._validation = validation
        self._is_local = is_local
        # What draws from the global generators is read on the loop: a thread would take numbers from others.
        inline = validation.source.draws or validation.read_seconds < INLINE_READ_SECONDS
        self._actor = Actor("w5xde-validation", failed, inline=inline)

    def at_once(self, keys: list[Key]) -> dict[Key, Packed] | None:
        """These batches, if they need not be read; else None."""
        return {key: self._indices(key[1]) for key in keys} if self._is_local else None

    def get(self, key: Key, done: Callable[[ReadBatch], None]) -> None:
        """Call `done` with the batch, now or as soon as it has been read; or with why it cannot be."""
        self._actor.call(lambda: self._validation.pack(key[1]), done)

    def release(self, keys: list[Key]) -> None:
        """Do nothing: no batch is kept."""

    def _indices(self, number: int) -> Packed:
        chosen = self._validation.indices(number)
        return pack_batch(len(chosen), chosen)

    def stop(self) -> None:
        self._actor.stop()
