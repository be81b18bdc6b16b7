"""What a node expects of its coordinator: how large a frame may be, and which parameters and work make sense.

The coordinator says what is to be computed. How much memory this machine gives for it follows from the
node's own model, and for batches from the memory that there was when it joined.
"""

from __future__ import annotations

from w5xde.compression import NONE
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.model.layout import Blueprint
from w5xde.messages import CANARY_BODY_BYTES_MAX, ENTRIES_MAX, Loan, Message, Params, Work
from w5xde.protocol.wire import Limits

_MIB = 1024 * 1024
# A layout of the deepest model, and a canary. Nothing else is read before our own model is compared with it.
# Of each entry it says four fields, two of a shape and four of a fill, in two arrays, and perhaps a little
# more; so decoding it takes at most eight times its bytes, whatever they say.
WELCOME_VALUES_PER_ENTRY = 13
WELCOME_LIMITS = Limits(
    meta_bytes_max=16 * _MIB,
    body_bytes_max=CANARY_BODY_BYTES_MAX,
    words="welcome",
    values_max=WELCOME_VALUES_PER_ENTRY * ENTRIES_MAX,
)
# Batches that are sent at a time take at most this part of the memory that there was, those that wait twice
# that; but no machine is so busy that it has not the least. More would only fail later.
MEMORY_PART = 0.5
WORK_BYTES_LEAST = 64 * _MIB
# Lists and dicts grow when they are read: an empty one is four bytes on the wire, and a hundred here.
GROWTH = 32
META_BYTES_MAX = 64 * _MIB
# A coordinator lends what is being computed and one more, each perhaps with its parameters.
WAITING_MAX = 64
# As many as a step may have; and of those that are apart, each of which takes a vector.
BATCHES_MAX = 65536
APART_MAX = 64


class Expected:
    """What one node expects on one connection."""

    def __init__(self, blueprint: Blueprint, memory_bytes: int) -> None:
        self._blueprint = blueprint
        self._work_bytes_max = max(WORK_BYTES_LEAST, int(memory_bytes * MEMORY_PART))
        self._waiting = self._waiting_bytes = 0
        self.limits = Limits(
            min(META_BYTES_MAX, self._work_bytes_max // GROWTH),
            # Encoded parameters may be a little longer than as they are; `check_size` knows by how much.
            max(self._work_bytes_max, 2 * blueprint.whole_bytes),
        )

    def check_size(self, message: Message, body_bytes: int) -> None:
        """Refuse a body before it is received, if nothing that we expect is so large."""
        if isinstance(message, Params):
            self._check_params(message, body_bytes)
        elif body_bytes > self._work_bytes_max:
            raise RemoteProtocolError(
                f"batches of {body_bytes} bytes; this machine takes {self._work_bytes_max} at a time",
                code="W5-121",
            )

    def take(self, message: Params | Work, body_bytes: int) -> None:
        """This has come, and waits until it is `done`."""
        self.check_size(message, body_bytes)
        if isinstance(message, Work) and not all(map(_makes_sense, message.loans)):
            raise RemoteProtocolError(
                "work that makes no sense: its batches are not those it names", code="W5-120"
            )
        self._waiting += 1
        self._waiting_bytes += body_bytes if isinstance(message, Work) else 0
        if self._waiting > WAITING_MAX or self._waiting_bytes > 2 * self._work_bytes_max:
            raise RemoteProtocolError(
                f"{self._waiting} messages of {self._waiting_bytes} bytes wait here, and more is sent",
                code="W5-121",
            )

    def done(self, message: Params | Work, body_bytes: int) -> None:
        # What was taken on a connection before this one is not counted here.
        self._waiting = max(0, self._waiting - 1)
        count = body_bytes if isinstance(message, Work) else 0
        self._waiting_bytes = max(0, self._waiting_bytes - count)

    def _check_params(self, params: Params, body_bytes: int) -> None:
        blueprint = self._blueprint
        groups = blueprint.groups if params.whole else blueprint.moving_groups
        raw_bytes = blueprint.whole_bytes if params.whole else blueprint.moving_bytes
        try:
            most = parse(params.codec).encoded_bytes_max(raw_bytes, groups)
        except ValueError as error:
            raise RemoteProtocolError(
                f"parameters encoded as {params.codec!r}: {error}", code="W5-122"
            ) from None
        if body_bytes > most or (params.codec == NONE and body_bytes != raw_bytes):
            raise RemoteProtocolError(
                f"parameters of {body_bytes} bytes as {params.codec}; our model has {raw_bytes}",
                code="W5-122",
            )


def _makes_sense(loan: Loan) -> bool:
    sizes = [batch.samples for batch in loan.batches]
    return (
        loan.start < loan.stop <= loan.count <= (APART_MAX if loan.apart else BATCHES_MAX)
        and len(sizes) == loan.stop - loan.start
        and min(sizes) > 0
        and sum(sizes) <= loan.samples
    )
