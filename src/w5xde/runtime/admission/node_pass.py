"""A node's pass: proves in each greeting that the node may join, by its credential or else by its ticket.

The ticket may be another one at the next dial, because its coordinator was restarted elsewhere. A node that
was welcome once goes with it only to the same coordinator: its user chose that run and no other. Knows no
connections and decides nothing about them.
"""

from __future__ import annotations

from typing import TypedDict

import torch

import w5xde
from w5xde.errors import JoinError, StorageError
from w5xde.learn.model.device import core_count
from w5xde.messages import PROTOCOL_VERSION, Hello
from w5xde.runtime.admission.credentials import (
    CREDENTIAL_BYTES,
    NODE_ID_BYTES,
    Credential,
    NodeCredentials,
    pool_of,
)
from w5xde.runtime.admission.ticket_source import TicketSource
from w5xde.runtime.system.machine import machine_name
from w5xde.ticket import Secret, Ticket, shown

# The coordinator knows neither this credential nor this ticket; or it knew the ticket, which is over.
_UNKNOWN, _NO_LONGER = "W5-113", "W5-105"
# The ticket is that of another coordinator now.
OTHER_RUN = "W5-119"


class GreetingProof(TypedDict, total=False):
    """The fields of a greeting that prove who the node is."""

    ticket: bytes
    credential: bytes


class NodePass:
    """One node's ticket and credential. With `keeps` the credential is stored for the next time."""

    def __init__(self, source: TicketSource | Ticket, *, keeps: bool = True) -> None:
        """The source has found a ticket already."""
        self._source = TicketSource(source) if isinstance(source, Ticket) else source
        self._keeps = keeps
        self._place: NodeCredentials | None = None
        # Why the coordinator refused this ticket, if another one may follow.
        self._refusal: JoinError | None = None
        self._use(self._source.ticket)

    def _use(self, ticket: Ticket) -> None:
        """Take the credential that belongs to a ticket, if there is one."""
        self.close()
        self.ticket = ticket
        self._place = NodeCredentials(pool_of(ticket)) if self._keeps else None
        self._credential = self._place.load() if self._place is not None else None

    async def renew(self, *, was_welcome: bool) -> Ticket:
        """Look where the coordinator is now. JoinError if the ticket is of no use.

        A node that was welcome keeps its credential and its coordinator.
        """
        ticket = await self._source.look()
        if ticket == self.ticket:
            if self._refusal is not None:
                raise self._refusal
            return ticket
        self._refusal = None
        if was_welcome and _identity(ticket) != _identity(self.ticket):
            raise JoinError(
                f"the ticket is now that of another coordinator, fingerprint {shown(ticket.fingerprint)}",
                code=OTHER_RUN,
                why=f"this node has worked for the one with {shown(self.ticket.fingerprint)}, and does not"
                " change to a run that its user did not choose",
                fix="join again if you mean the new run",
            )
        if was_welcome or pool_of(ticket) == pool_of(self.ticket):
            self.ticket = ticket
        else:
            self._use(ticket)
        return ticket

    def greeting(self, name: str, run: str, device: torch.device, *, shares: bool = False) -> Hello:
        """Return the greeting of a node that computes on this device and asks for this name."""
        return Hello(
            protocol=PROTOCOL_VERSION,
            package=w5xde.__version__,
            name=name,
            run=run,
            device=str(device),
            torch=str(torch.__version__),
            machine=machine_name(),
            cores=core_count(),
            shares=shares,
            **self._proof(),
        )

    def _proof(self) -> GreetingProof:
        if self._credential is not None:
            return {"credential": self._credential.node_id + self._credential.secret.reveal()}
        return {"ticket": self.ticket.id + self.ticket.secret.reveal()}

    def keep(self, credential: bytes) -> str:
        """Use this credential from now on, and store it; returns why that failed, or an empty text."""
        if len(credential) != NODE_ID_BYTES + CREDENTIAL_BYTES:
            return ""
        self._credential = Credential(credential[:NODE_ID_BYTES], Secret(credential[NODE_ID_BYTES:]))
        try:
            if self._place is not None:
                self._place.save(self._credential)
        except StorageError as error:
            # Valid until this process ends.
            return error.what
        return ""

    def falls_back(self, code: str) -> bool:
        """Forget a credential that was refused as unknown; returns whether the ticket may be tried."""
        if code != _UNKNOWN or self._credential is None:
            return False
        self._credential = None
        if self._place is not None:
            self._place.forget()
        return True

    def awaits_another(self, refusal: JoinError) -> bool:
        """Note that the ticket was refused; returns whether its source may have another one later.

        A file may be older than the run that its coordinator has begun meanwhile.
        """
        if not self._source.may_change or refusal.code not in (_UNKNOWN, _NO_LONGER):
            return False
        self._refusal = refusal
        return True

    def close(self) -> None:
        if self._place is not None:
            self._place.close()


def _identity(ticket: Ticket) -> tuple[bytes, bool, bool]:
    """How a node knows its coordinator: by a certificate, by an authority, or not at all."""
    return ticket.fingerprint, ticket.is_clear, ticket.is_pki
