"""A node's pass: proves in each greeting that the node may join, by its credential or else by its ticket.

Knows no connections and decides nothing about them.
"""

from __future__ import annotations

from typing import TypedDict

import torch

import w5xde
from w5xde.errors import StorageError
from w5xde.learn.model.device import core_count
from w5xde.messages import PROTOCOL_VERSION, Hello
from w5xde.runtime.admission.credentials import (
    CREDENTIAL_BYTES,
    NODE_ID_BYTES,
    Credential,
    NodeCredentials,
    pool_of,
)
from w5xde.runtime.system.machine import machine_name
from w5xde.ticket import Secret, Ticket

# The coordinator knows neither this credential nor this ticket.
_UNKNOWN = "W5-113"


class GreetingProof(TypedDict, total=False):
    """The fields of a greeting that prove who the node is."""

    ticket: bytes
    credential: bytes


class NodePass:
    """One node's ticket and credential. With `keeps` the credential is stored for the next time."""

    def __init__(self, ticket: Ticket, *, keeps: bool = True) -> None:
        self.ticket = ticket
        self._place = NodeCredentials(pool_of(ticket)) if keeps else None
        self._credential = self._place.load() if self._place is not None else None

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

    def close(self) -> None:
        if self._place is not None:
            self._place.close()
