"""What a node shows at the door: the credential it was given when it first came, or else its ticket."""

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

# The coordinator does not know who we are.
_UNKNOWN = "W5-113"


class Shown(TypedDict, total=False):
    """The fields of a greeting that let one in."""

    ticket: bytes
    credential: bytes


class NodePass:
    """One node's ticket, and what it brought. Whoever does not keep it comes by its ticket each time."""

    def __init__(self, ticket: Ticket, *, keeps: bool = True) -> None:
        self.ticket = ticket
        self._place = NodeCredentials(pool_of(ticket)) if keeps else None
        self._credential = self._place.load() if self._place is not None else None

    def greeting(self, name: str, run: str, device: torch.device) -> Hello:
        """The first words of a node that computes there, and would like to be called so."""
        return Hello(
            protocol=PROTOCOL_VERSION,
            package=w5xde.__version__,
            name=name,
            run=run,
            device=str(device),
            torch=str(torch.__version__),
            # Whoever computes elsewhere needs no turn on the cores.
            machine=machine_name() if device.type == "cpu" else "",
            cores=core_count(),
            **self.shown(),
        )

    def shown(self) -> Shown:
        if self._credential is not None:
            return {"credential": self._credential.node_id + self._credential.secret.reveal()}
        return {"ticket": self.ticket.id + self.ticket.secret.reveal()}

    def granted(self, credential: bytes) -> str:
        """Keep what we were given to come back with; returns why that did not work, if it did not."""
        if len(credential) != NODE_ID_BYTES + CREDENTIAL_BYTES:
            return ""
        self._credential = Credential(credential[:NODE_ID_BYTES], Secret(credential[NODE_ID_BYTES:]))
        try:
            if self._place is not None:
                self._place.save(self._credential)
        except StorageError as error:
            # Good until this process ends.
            return error.what
        return ""

    def falls_back(self, code: str) -> bool:
        """Whether we were refused for a credential that nobody knows: then the ticket may do."""
        if code != _UNKNOWN or self._credential is None:
            return False
        self._credential = None
        if self._place is not None:
            self._place.forget()
        return True

    def close(self) -> None:
        if self._place is not None:
            self._place.close()
