"""The entrance of a run: how its door is guarded, which tickets it hands out, and who is let in.

    only this machine reaches it       clear text; nobody else's wire is on the way
    any other address                  TLS 1.3 with the run's own certificate, which every ticket pins
    --tls-cert, --tls-key, --tls-ca    TLS 1.3 with the user's certificate, under the ordinary rules
    --insecure                         clear text, said so at both ends

Whatever it is, everybody shows a secret in its greeting. Nodes that the coordinator starts itself have one
that exists in memory alone; all others a ticket, or the credential that a ticket brought them. The register
is a file and takes time, so it has a thread of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from w5xde.config import Settings
from w5xde.errors import UsageError
from w5xde.messages import Hello
from w5xde.runtime.admission import private_files as private
from w5xde.runtime.admission.credentials import CREDENTIAL_BYTES, NODE_ID_BYTES
from w5xde.runtime.admission.register import Refused, TicketRegister
from w5xde.runtime.admission.register_rows import Entrance, TicketRow
from w5xde.runtime.net import tls
from w5xde.runtime.system.machine import own_addresses
from w5xde.ticket import ADDRESSES_MAX, ID_BYTES, SECRET_BYTES, Secret, Ticket

if TYPE_CHECKING:
    from w5xde.runtime.net.listener import ListenAddress

# How soon it counts what `w5xde ticket` did meanwhile.
REFRESH_SECONDS = 1.0
FIRST_LABEL = "printed at start"


@dataclass(frozen=True, slots=True)
class Admission:
    """Who somebody is, who has shown it."""

    # Empty for nodes of our own, and for those who only look.
    node_id: bytes = b""
    # What it is told to come back with, if it came by a ticket.
    credential: bytes = b""
    ticket_id: bytes = b""


class Entry:
    """How one comes into one run."""

    def __init__(self, folder: Path, run_id: str, settings: Settings) -> None:
        self._folder = folder
        self._run_id = run_id
        self._settings = settings
        self._house_id = secrets.token_bytes(ID_BYTES)
        self._house_secret = Secret(secrets.token_bytes(SECRET_BYTES))
        self._entrance: Entrance | None = None
        self._register: TicketRegister | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="w5xde-register")
        self._next_refresh = 0.0
        self._bans: list[Future[TicketRow | None]] = []
        # What a user hands on; shown by whoever shows the run.
        self.ticket: Ticket | None = None
        # Others' machines may join, and nothing is encrypted.
        self.is_exposed = False
        self._fingerprint = self._house_fingerprint = b""
        self._is_clear = self._is_pki = False

    # --- opening ------------------------------------------------------------------------------------

    def guard(self, places: list[ListenAddress]) -> tls.Context | None:
        """How connections to these places are secured; None: not at all."""
        files = self._settings
        is_local = all(place.is_loopback for place in places)
        if files.tls_cert is not None and files.tls_key is not None:
            if files.insecure:
                raise UsageError(
                    "--insecure means clear text, and --tls-cert a certificate",
                    code="W5-505",
                    fix="leave out one of them",
                )
            self._is_pki = True
            ca = Path(files.tls_ca) if files.tls_ca is not None else None
            context = tls.server_context(Path(files.tls_cert), Path(files.tls_key), ca)
            self._house_fingerprint = tls.fingerprint_of(Path(files.tls_cert))
            return context
        if files.tls_ca is not None:
            raise UsageError(
                "--tls-ca says whose nodes may come, and needs a certificate of the coordinator's own",
                code="W5-505",
                fix="give --tls-cert and --tls-key too",
            )
        if is_local or files.insecure:
            self._is_clear = True
            self.is_exposed = not is_local
            return None
        # Only who makes certificates needs the library that does.
        from w5xde.runtime.admission.identity import RunIdentity

        identity = RunIdentity.load_or_create(self._run_id, anew=self._settings.new_identity)
        self._fingerprint = self._house_fingerprint = identity.fingerprint
        return tls.server_context(identity.file)

    def open(self, host: str, port: int) -> None:
        """The door is open at this address: from now on there are tickets."""
        self._entrance = Entrance(
            addresses=tuple((each, port) for each in self._hosts(host)),
            fingerprint=self._fingerprint.hex(),
            is_clear=self._is_clear,
            is_pki=self._is_pki,
        )
        self._register = TicketRegister.begin(self._folder, self._entrance, anew=self._settings.new_identity)
        self.ticket = self._register.new(time.time(), label=FIRST_LABEL)
        if self._settings.ticket_file is not None:
            private.replace(Path(self._settings.ticket_file), self.ticket.to_text().encode() + b"\n")

    def _hosts(self, bound: str) -> list[str]:
        """Where nodes are told to come to."""
        if self._settings.advertise is not None:
            return [each.strip() for each in self._settings.advertise.split(",")]
        if bound in ("0.0.0.0", "::"):
            return own_addresses(6 if bound == "::" else 4)[:ADDRESSES_MAX]
        # A certificate of an authority is for a name.
        return [self._settings.host if self._is_pki else bound]

    def house_ticket(self, host: str, port: int) -> Ticket:
        """What nodes come with that we start ourselves: known to this process and theirs alone.

        They know our very certificate, whatever name it is for.
        """
        return Ticket(
            addresses=((host, port),),
            fingerprint=self._house_fingerprint,
            id=self._house_id,
            secret=self._house_secret,
            is_clear=self._is_clear,
        )

    # --- letting in ---------------------------------------------------------------------------------

    def is_of_the_house(self, hello: Hello) -> bool:
        proof = self._house_id + self._house_secret.reveal()
        return hmac.compare_digest(hello.ticket, proof)

    def admit(self, hello: Hello, address: str) -> asyncio.Future[Admission]:
        """Who this is; Refused, or StorageError if the register cannot be used."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._admit, hello, address)

    def _admit(self, hello: Hello, address: str) -> Admission:
        """On the register's thread."""
        register = self._register
        if register is None:
            raise RuntimeError("somebody came before the door was open")
        if len(hello.credential) == NODE_ID_BYTES + CREDENTIAL_BYTES:
            node_id, secret = hello.credential[:NODE_ID_BYTES], hello.credential[NODE_ID_BYTES:]
            register.admit_node(node_id, secret)
            return Admission(node_id)
        if len(hello.ticket) != ID_BYTES + SECRET_BYTES:
            raise Refused(
                "unknown", "joining needs a ticket", code="W5-113", fix="use the line that w5xde serve prints"
            )
        ticket_id, secret = hello.ticket[:ID_BYTES], hello.ticket[ID_BYTES:]
        if hello.looks:
            register.check_ticket(ticket_id, secret, time.time(), address)
            return Admission(ticket_id=ticket_id)
        given = register.admit_ticket(ticket_id, secret, time.time(), name=hello.name, address=address)
        return Admission(given.node_id, given.node_id + given.secret.reveal(), ticket_id)

    def refresh(self, now: float) -> asyncio.Future[bool] | None:
        """Read again what others changed, if it is time to; the future tells whether they did."""
        if now < self._next_refresh or self._register is None:
            return None
        self._next_refresh = now + REFRESH_SECONDS
        return asyncio.get_running_loop().run_in_executor(self._thread, self._register.refresh)

    def turn_out(self, node_id: bytes, reason: str) -> asyncio.Future[TicketRow | None]:
        """Ban a node; the future tells of its ticket, if that is revoked with it."""
        if self._register is None:
            raise RuntimeError("somebody was turned out before the door was open")
        # In the order of asking: whoever comes back after this is asked about after this.
        banning = self._thread.submit(self._register.turn_out, node_id, reason, time.time())
        self._bans = [banning, *(each for each in self._bans if not each.done())]
        return asyncio.wrap_future(banning)

    def ban_of(self, node_id: bytes) -> str | None:
        """Why a node may not stay, as far as was read."""
        return self._register.ban_of(node_id) if self._register is not None else None

    def close(self) -> None:
        # Who was turned out at the very end is banned too, when the run goes on.
        wait(self._bans)
        self._thread.shutdown(wait=False, cancel_futures=True)
