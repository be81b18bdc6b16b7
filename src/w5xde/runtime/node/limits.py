"""The limits of a node: how large a frame its coordinator may send, and which parameters and work it accepts.

The coordinator says what to compute. How much memory this machine gives for that follows from the node's own
model, and for batches from the memory that was free when it joined. Knows no sockets and computes nothing.
"""

from __future__ import annotations

import math

from w5xde.compression import NONE
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.model.layout import Blueprint
from w5xde.learn.rounds.columns import Columns
from w5xde.message_types import CANARY_BODY_BYTES_MAX, CODE_BYTES_MAX, ENTRIES_MAX
from w5xde.messages import Difference, Loan, Message, Params, Work
from w5xde.protocol.wire import Body, Limits
from w5xde.specs.round_lengths import ROUND_STEPS_MAX

_MIB = 1024 * 1024
# A Welcome says for each entry of the deepest model four fields, two sizes and four numbers of a fill, in two
# arrays, and a little more. With this limit, decoding any Welcome takes at most eight times its bytes.
WELCOME_VALUES_PER_ENTRY = 13
WELCOME_LIMITS = Limits(
    meta_bytes_max=16 * _MIB,
    body_bytes_max=CANARY_BODY_BYTES_MAX,
    words="welcome",
    values_max=WELCOME_VALUES_PER_ENTRY * ENTRIES_MAX,
)
# An Offer names at most CODE_FILES_MAX files and PACKAGES_MAX modules and packages: less than half of this.
OFFER_LIMITS = Limits(meta_bytes_max=128 * 1024, body_bytes_max=CODE_BYTES_MAX, words="offer")
# The batches of one message may take this part of the free memory, and those that wait twice as much; on any
# machine at least WORK_BYTES_LEAST. More would only fail later, while computing.
MEMORY_PART = 0.5
WORK_BYTES_LEAST = 64 * _MIB
# Lists and dicts grow when they are decoded: an empty one is four bytes on the wire, and a hundred in memory.
GROWTH = 32
META_BYTES_MAX = 64 * _MIB
# A coordinator lends one lease to compute and one to wait, each perhaps with its parameters.
WAITING_MAX = 64
# The most batches of a loan, as many as a step may have; and of one that is `apart`, which no Cancel
# interrupts.
BATCHES_MAX = 65536
APART_MAX = 64
# Each discarded message makes the coordinator halve what it lends: sixteen times until one batch is left, and
# one more message of each size may be on its way. A coordinator that sends more ignores the answers.
DISCARDED_IN_A_ROW_MAX = 64
_DISCARDED_AT_ONCE_BYTES = 256 * 1024
# The body of work that this node cannot hold.
DISCARDED = bytearray()


class Discard:
    """Receives a body and keeps none of it."""

    body = DISCARDED

    def __init__(self) -> None:
        self._room = memoryview(bytearray(_DISCARDED_AT_ONCE_BYTES))

    def get_buffer(self) -> memoryview:
        return self._room

    def buffer_updated(self, count: int) -> None:
        """Forget what was received."""


class NodeLimits:
    """What one node accepts on one connection."""

    def __init__(
        self, blueprint: Blueprint, memory_bytes: int, sample_bytes: int = 0, columns: Columns | None = None
    ) -> None:
        """`sample_bytes`: what a sample takes that arrives as a number. `columns`: this is rounds mode."""
        self._blueprint = blueprint
        self._columns = columns
        self._sample_bytes = sample_bytes
        self._work_bytes_max = max(WORK_BYTES_LEAST, int(memory_bytes * MEMORY_PART))
        self._waiting = self._waiting_bytes = self._discarded_in_a_row = 0
        # A body of any length may begin: `check_size` refuses it by its message, and `fits` discards it.
        self.frame = Limits(min(META_BYTES_MAX, self._work_bytes_max // GROWTH), body_bytes_max=2**62)

    def check_size(self, message: Message, body_bytes: int) -> None:
        """Raise before a body is received, if no message that this node accepts is so large."""
        if isinstance(message, Params | Difference):
            self._check_params(message, body_bytes)
        elif not self.fits(message, body_bytes) and not (isinstance(message, Work) and _batches(message) > 1):
            count = self._bytes_of(message, body_bytes)
            raise RemoteProtocolError(
                f"a batch of {count} bytes; this machine holds {self._work_bytes_max} at a time",
                code="W5-121",
            )

    def fits(self, message: Message, body_bytes: int) -> bool:
        """Whether this node can hold a body; if not, it must discard it, and ask for less by dropping it."""
        is_bounded = isinstance(message, Params | Difference)
        return is_bounded or self._bytes_of(message, body_bytes) <= self._work_bytes_max

    def _bytes_of(self, message: Message, body_bytes: int) -> int:
        """The bytes of a message, with those of samples that are not in its body but in our cache."""
        if not self._sample_bytes or not isinstance(message, Work):
            return body_bytes
        listed = [batch.samples for loan in message.loans for batch in loan.batches if batch.listed]
        return body_bytes + self._sample_bytes * sum(listed)

    def take(self, message: Params | Difference | Work, body: Body) -> Body:
        """Count a message as waiting until `done`; returns its body, or DISCARDED if it does not fit."""
        self.check_size(message, len(body))
        if isinstance(message, Work) and not self._makes_sense(message):
            raise RemoteProtocolError(
                "work that makes no sense: its batches are not those it names", code="W5-120"
            )
        if not self.fits(message, len(body)):
            body = DISCARDED
        if isinstance(message, Work):
            self._discarded_in_a_row = self._discarded_in_a_row + 1 if body is DISCARDED else 0
            # Listed samples take memory only when their batch is computed.
            self._waiting_bytes += len(body)
        self._waiting += 1
        if self._waiting > WAITING_MAX or self._waiting_bytes > 2 * self._work_bytes_max:
            raise RemoteProtocolError(
                f"{self._waiting} messages of {self._waiting_bytes} bytes wait here, and more is sent",
                code="W5-121",
            )
        if self._discarded_in_a_row > DISCARDED_IN_A_ROW_MAX:
            raise RemoteProtocolError("batches that do not fit are sent again and again", code="W5-121")
        return body

    def done(self, message: Params | Difference | Work, body_bytes: int) -> None:
        # A message that came on an earlier connection is not counted here.
        self._waiting = max(0, self._waiting - 1)
        if isinstance(message, Work):
            self._waiting_bytes = max(0, self._waiting_bytes - body_bytes)

    def _makes_sense(self, work: Work) -> bool:
        validates = {loan.validates for loan in work.loans}
        if True in validates and (False in validates or any(loan.apart for loan in work.loans)):
            return False
        if self._columns is None or True in validates:
            return work.rates is None and all(map(_is_possible, work.loans))
        rates, groups = work.rates, self._columns.groups
        if rates is None or not all(_is_column(loan, len(rates.of_steps)) for loan in work.loans):
            return False
        rows = [*rates.of_steps, *rates.momenta, *([rates.sums_before] if rates.sums_before else [])]
        is_even = all(len(row) == groups for row in rows) and len(rates.momenta) in (0, len(rates.of_steps))
        return is_even and all(math.isfinite(number) for row in rows for number in row)

    def _check_params(self, params: Params | Difference, body_bytes: int) -> None:
        blueprint = self._blueprint
        if isinstance(params, Difference):
            if self._columns is None:
                raise RemoteProtocolError("a difference, and this run has no rounds", code="W5-120")
            groups, raw_bytes = self._columns.vectors.moving_groups, self._columns.vectors.moving_bytes
        else:
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


def _batches(work: Work) -> int:
    return sum(len(loan.batches) for loan in work.loans)


def _is_column(loan: Loan, steps: int) -> bool:
    """Whether a loan is a column of a round of so many steps."""
    sizes = [batch.samples for batch in loan.batches]
    is_place = loan.start + 1 == loan.stop <= loan.count <= BATCHES_MAX and not loan.apart
    return is_place and 0 < len(sizes) == steps <= ROUND_STEPS_MAX and min(sizes) > 0


def _is_possible(loan: Loan) -> bool:
    sizes = [batch.samples for batch in loan.batches]
    return (
        loan.start < loan.stop <= loan.count <= (APART_MAX if loan.apart else BATCHES_MAX)
        and len(sizes) == loan.stop - loan.start
        and min(sizes) > 0
        and sum(sizes) <= loan.samples
    )
