"""The gatekeeper: how connections to a run are encrypted, which tickets it issues, and which nodes it admits.

    only this machine can connect      clear text; nothing leaves the machine
    any other address                  TLS 1.3 with the run's own certificate, which every ticket pins
    --identity DIR                     the same at any address, with the certificate in that folder
    --tls-cert, --tls-key, --tls-ca    TLS 1.3 with the user's certificate, checked as browsers do
    --insecure                         clear text; both sides print a warning

Every node proves itself in its greeting, over any of these. Local nodes, which the coordinator starts itself,
each have a secret that is only in memory; all other nodes have a ticket, or the credential that they got for
one. The register is a file, which takes time to read and write, so it has its own thread. Knows no peers.
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
from w5xde.runtime.admission import private_files
from w5xde.runtime.admission.credentials import CREDENTIAL_BYTES, NODE_ID_BYTES
from w5xde.runtime.admission.offline_tickets import KnownTicket
from w5xde.runtime.admission.register import Refused, TicketRegister, pinned_before
from w5xde.runtime.admission.register_rows import Entrance, TicketRow
from w5xde.runtime.net import tls
from w5xde.runtime.system.machine import own_addresses
from w5xde.runtime.system.shared_memory import LocalShare
from w5xde.specs.run_settings import parse_lifetime, parse_uses
from w5xde.ticket import ADDRESSES_MAX, ID_BYTES, SECRET_BYTES, Secret, Ticket, shown

if TYPE_CHECKING:
    from w5xde.runtime.net.listener import ListenAddress

# How often the register is read again for changes that `w5xde ticket` made.
REFRESH_SECONDS = 1.0
FIRST_LABEL = "printed at start"
# A ticket that was made before the run admits nobody any more.
EXPIRED = "W5-125"
# A run that is resumed has not the identity that its tickets pin.
OTHER_BEFORE = "W5-127"
# A request to start a node may be repeated: its process has the secret of the one or of the other.
LOCAL_PASSES_MAX = 2


@dataclass(frozen=True, slots=True)
class Admission:
    """A node that has proved itself."""

    # Empty for local nodes, and for those that only look.
    node_id: bytes = b""
    # For a node that joined with a ticket: its credential, with which it can rejoin.
    credential: bytes = b""
    ticket_id: bytes = b""
    # The name that the register has for it, or under which we started it; empty if it has none.
    name: str = ""
    is_local: bool = False
    # The memory that we share with this local node.
    share: LocalShare | None = None


@dataclass(frozen=True, slots=True)
class _LocalPass:
    """The secret of a local node, and what admits whom by it."""

    secret: Secret
    admission: Admission


class Gatekeeper:
    """Encrypts the connections of one run, issues its tickets, and admits its nodes."""

    def __init__(self, folder: Path, run_id: str, settings: Settings) -> None:
        self._folder = folder
        self._run_id = run_id
        self._settings = settings
        # By the id of the ticket.
        self._local_passes: dict[bytes, _LocalPass] = {}
        self._open_register: TicketRegister | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="w5xde-register")
        self._next_refresh = 0.0
        self._bans: list[Future[TicketRow | None]] = []
        # The ticket that is printed when the run starts, and how that line names it: a ticket that was made
        # before the run stays in its file.
        self.ticket: Ticket | None = None
        self.ticket_shown = ""
        # Sentences for the user, once the run is open.
        self.warnings: list[str] = []
        self._known: KnownTicket | None = None
        self._is_local = False
        # Whether other machines can join and nothing is encrypted.
        self.is_exposed = False
        # Of the certificate: as tickets pin it, and as local nodes do, which trust no authority.
        self._fingerprint = self._local_fingerprint = b""
        self._is_clear = self._is_pki = False
        # Of the run's own certificate, if it has one.
        self._key_file: Path | None = None

    # --- opening ------------------------------------------------------------------------------------

    def read_known_ticket(self) -> int:
        """Read the ticket that was made before the run; returns its port, or 0 if there is none."""
        settings = self._settings
        if settings.known_ticket is None or settings.identity is None:
            return 0
        self._known = KnownTicket(settings.known_ticket, Path(settings.identity))
        return self._known.port

    def guard(self, places: list[ListenAddress]) -> tls.Context | None:
        """Return how connections to these places are encrypted; None: they are not."""
        settings = self._settings
        is_local = self._is_local = all(place.is_loopback for place in places)
        if settings.identity is not None:
            return self._guard_by_given(Path(settings.identity))
        if settings.tls_cert is not None and settings.tls_key is not None:
            if settings.insecure:
                raise UsageError(
                    "--insecure means clear text, and --tls-cert a certificate",
                    code="W5-505",
                    fix="leave out one of them",
                )
            self._is_pki = True
            ca = Path(settings.tls_ca) if settings.tls_ca is not None else None
            context = tls.server_context(Path(settings.tls_cert), Path(settings.tls_key), ca)
            self._local_fingerprint = tls.fingerprint_of(Path(settings.tls_cert))
            return context
        if settings.tls_ca is not None:
            raise UsageError(
                "--tls-ca says whose nodes may come, and needs a certificate of the coordinator's own",
                code="W5-505",
                fix="give --tls-cert and --tls-key too",
            )
        if is_local or settings.insecure:
            self._is_clear = True
            self.is_exposed = not is_local
            return None
        # Imported here because only a run that makes its own certificate needs the cryptography package.
        from w5xde.runtime.admission.identity import RunIdentity

        identity = RunIdentity.load_or_create(self._run_id, anew=settings.new_identity)
        self._key_file = identity.file
        self._fingerprint = self._local_fingerprint = identity.fingerprint
        return tls.server_context(identity.file)

    def _guard_by_given(self, folder: Path) -> tls.Context:
        """Use the identity in a folder that the user named: always with TLS, so that its tickets fit."""
        settings = self._settings
        others = {
            "--insecure": settings.insecure,
            "--tls-cert": settings.tls_cert is not None or settings.tls_ca is not None,
            "--new-identity": settings.new_identity,
        }
        for flag in (flag for flag, is_given in others.items() if is_given):
            raise UsageError(
                f"--identity names the certificate of this run, and {flag} wants another one, or none",
                code="W5-505",
                fix="leave out one of them; for a new identity name another folder",
            )
        from w5xde.runtime.admission.identity import RunIdentity

        identity = RunIdentity.load_given(folder, self._run_id)
        if self._known is not None:
            self._known.require_identity(identity.fingerprint)
        self._fingerprint = self._local_fingerprint = identity.fingerprint
        return tls.server_context(identity.file)

    def open(self, host: str, port: int) -> None:
        """Begin to issue tickets, for a listener at this address."""
        entrance = Entrance(
            addresses=tuple((each, port) for each in self._hosts(host)),
            fingerprint=self._fingerprint.hex(),
            is_clear=self._is_clear,
            is_pki=self._is_pki,
        )
        before = pinned_before(self._folder) if not self._settings.new_identity else ""
        if before and before != entrance.fingerprint:
            self.warnings.append(
                f"{OTHER_BEFORE}: this run had another identity before, {shown(bytes.fromhex(before))}: no"
                " node and no ticket of before can come; if its key is elsewhere, name that with --identity"
            )
        self._open_register = TicketRegister.begin(
            self._folder,
            entrance,
            anew=self._settings.new_identity,
            is_resumed=self._settings.goes_on,
        )
        now, file = time.time(), self._settings.ticket_file
        if self._known is not None:
            self._know(self._known, port, now)
        # A ticket in a file must say where the run is now, also if another one was made before.
        if self._known is None or file is not None:
            ticket = self._register.new(
                now,
                lifetime_seconds=parse_lifetime(self._settings.ticket_lifetime),
                uses=parse_uses(self._settings.ticket_uses),
                label=FIRST_LABEL,
            )
            if self._known is None:
                self.ticket, self.ticket_shown = ticket, ticket.to_text()
            if file is not None:
                private_files.replace(Path(file), ticket.to_text().encode() + b"\n")

    def _know(self, known: KnownTicket, port: int, now: float) -> None:
        """Admit nodes by a ticket that was made before the run."""
        misfit = known.misfit(port, is_local=self._is_local)
        row, was_known = self._register.know(known.row(now))
        reason = known.expired(now) or ("its ticket was revoked" if row.state(now) == "revoked" else "")
        if reason and not was_known:
            raise UsageError(
                f"{reason}, so no node could join",
                code=EXPIRED,
                fix="make another one:  w5xde ticket new --offline --identity DIR --advertise HOST",
            )
        self.warnings += [misfit] if misfit else []
        self.warnings += [f"{EXPIRED}: {reason}; nodes that joined before can come back"] if reason else []
        self.ticket, self.ticket_shown = known.ticket, known.place

    @property
    def _register(self) -> TicketRegister:
        if self._open_register is None:
            raise RuntimeError("the gatekeeper was asked before it was open")
        return self._open_register

    def _hosts(self, bound: str) -> list[str]:
        """Return the hosts that tickets name."""
        if self._settings.advertise is not None:
            return [each.strip() for each in self._settings.advertise.split(",")]
        if bound in ("0.0.0.0", "::"):
            return own_addresses(6 if bound == "::" else 4)[:ADDRESSES_MAX]
        # The certificate of an authority is valid for a name, not for an address.
        return [self._settings.host if self._is_pki else bound]

    def local_ticket(self, host: str, port: int, name: str = "", share: LocalShare | None = None) -> Ticket:
        """Return a ticket for local nodes, which only this process and theirs know.

        With a name it admits the node of that name, with which we share this memory. It pins the certificate,
        whatever name that is valid for.
        """
        ticket_id, secret = secrets.token_bytes(ID_BYTES), Secret(secrets.token_bytes(SECRET_BYTES))
        for key in self._passes_of(name)[: 1 - LOCAL_PASSES_MAX or None]:
            del self._local_passes[key]
        admission = Admission(name=name, is_local=True, share=share)
        self._local_passes[ticket_id] = _LocalPass(secret, admission)
        return Ticket(
            addresses=((host, port),),
            fingerprint=self._local_fingerprint,
            id=ticket_id,
            secret=secret,
            is_clear=self._is_clear,
        )

    # --- admitting ----------------------------------------------------------------------------------

    def local_node(self, hello: Hello) -> Admission | None:
        """Return how a local node is admitted; None if this greeting is not from one.

        Earlier processes of its name are admitted no more, and their memory is released.
        """
        ticket_id = hello.ticket[:ID_BYTES]
        found = self._local_passes.get(ticket_id)
        if found is None or not hmac.compare_digest(hello.ticket[ID_BYTES:], found.secret.reveal()):
            return None
        for key in self._passes_of(found.admission.name):
            if key == ticket_id:
                break  # those of later processes follow
            del self._local_passes[key]
        return found.admission

    def _passes_of(self, name: str) -> list[bytes]:
        """The keys of the passes of the local node with this name, oldest first."""
        return [key for key, each in self._local_passes.items() if name and each.admission.name == name]

    def admit(self, hello: Hello, address: str) -> asyncio.Future[Admission]:
        """Look up a greeting in the register. Raises Refused, or StorageError if the register fails."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._admit, hello, address)

    def _admit(self, hello: Hello, address: str) -> Admission:
        """Runs on the register's thread."""
        register = self._register
        if len(hello.credential) == NODE_ID_BYTES + CREDENTIAL_BYTES:
            node_id, secret = hello.credential[:NODE_ID_BYTES], hello.credential[NODE_ID_BYTES:]
            return Admission(node_id, name=register.admit_node(node_id, secret).name)
        if len(hello.ticket) != ID_BYTES + SECRET_BYTES:
            raise Refused(
                "unknown", "joining needs a ticket", code="W5-113", fix="use the line that w5xde serve prints"
            )
        ticket_id, secret = hello.ticket[:ID_BYTES], hello.ticket[ID_BYTES:]
        if hello.looks:
            register.check_ticket(ticket_id, secret, time.time(), address)
            return Admission(ticket_id=ticket_id)
        given = register.admit_ticket(ticket_id, secret, time.time(), name=hello.name, address=address)
        name = register.name_of(given.node_id)
        return Admission(given.node_id, given.node_id + given.secret.reveal(), ticket_id, name)

    def rename(self, node_id: bytes, name: str) -> asyncio.Future[None]:
        """Write the name that a node has in the run into the register, by which its user bans it."""
        return asyncio.wrap_future(self._thread.submit(self._register.rename, node_id, name))

    def refresh(self, now: float) -> asyncio.Future[bool] | None:
        """Read the register again, if it is time to; the result is whether it changed."""
        if now < self._next_refresh or self._open_register is None:
            return None
        self._next_refresh = now + REFRESH_SECONDS
        return asyncio.get_running_loop().run_in_executor(self._thread, self._register.refresh)

    def ban(self, node_id: bytes, reason: str) -> asyncio.Future[TicketRow | None]:
        """Ban a node; the result is its ticket, if that is revoked too."""
        # One thread keeps the order: if the node reconnects after this call, it is looked up after the ban.
        banning = self._thread.submit(self._register.ban_node, node_id, reason, time.time())
        self._bans = [banning, *(each for each in self._bans if not each.done())]
        return asyncio.wrap_future(banning)

    def ban_of(self, node_id: bytes) -> str | None:
        """Return why a node is banned, as the register was last read."""
        return self._open_register.ban_of(node_id) if self._open_register is not None else None

    def forget_identity(self) -> None:
        """Remove the key of a run that is never resumed."""
        if self._key_file is not None:
            private_files.remove(self._key_file)

    def close(self) -> None:
        # A node that was banned at the very end must still be banned when the run is resumed.
        wait(self._bans)
        self._thread.shutdown(wait=False, cancel_futures=True)
