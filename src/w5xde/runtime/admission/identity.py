"""A run's identity: the key and certificate by which nodes recognise their coordinator.

    STATE/runs/0123456789abcdef.pem      key and certificate, in one file, so that there is never half of it
    DIR/identity.pem                     the same in a folder that the user named (--identity DIR)

The file is not in the run folder, because that is copied, shared and published, and the key must stay here. A
run keeps its identity after a crash, so its tickets stay valid; with a folder that other machines see too, it
also keeps it on another machine. Knows no sockets and no tickets.
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from w5xde.errors import StorageError
from w5xde.runtime.admission import private_files
from w5xde.runtime.admission.offline_tickets import IDENTITY_NAME

_RUN_ID = re.compile(r"[0-9a-f]{16}")
# The certificates of identities in named folders, which may have been a run's before.
_OURS = re.compile(r"CN=w5xde (identity|run [0-9a-f]{16})")
# Nodes trust the pinned certificate, so its dates must never make it invalid: neither on a computer whose
# clock starts in 1970, nor after years. The end is the one that RFC 5280 reserves for "no date".
_NOT_BEFORE = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)

_COMMON_NAME = "w5xde identity"
RESTORE = "restore it from a copy; or start with --new-identity and hand out new tickets"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """A coordinator's key and certificate."""

    file: Path
    # In DER, and the sha256 of that.
    certificate: bytes
    fingerprint: bytes
    # Whether it was made just now, so that no ticket of before pins it.
    is_new: bool

    @classmethod
    def load_or_create(cls, run_id: str, state: Path | None = None, *, anew: bool = False) -> RunIdentity:
        """Load the identity of a run, or make one if there is none; `anew`: make a new one in any case.

        Raises StorageError if it cannot be read: a new one would make all tickets invalid.
        """
        if not _RUN_ID.fullmatch(run_id):
            raise StorageError(
                f"{run_id!r} is not the id of a run", code="W5-413", fix="restore manifest.json"
            )
        folder = private_files.make_folder(state or private_files.state_folder(), "runs")
        file = folder / f"{run_id}.pem"
        # Two processes must not make two identities at the same time.
        with private_files.locked(folder / "lock"):
            if anew:
                private_files.remove(file)
            try:
                data, is_new = private_files.read(file), False
            except FileNotFoundError:
                data, is_new = make_certificate(_common_name(run_id)), True
                private_files.replace(file, data)
        return cls._of(data, file, is_new, re.compile(re.escape(f"CN={_common_name(run_id)}")), RESTORE)

    @classmethod
    def load_given(cls, folder: Path, run_id: str = "", state: Path | None = None) -> RunIdentity:
        """Load the identity in a folder that the user named, or make one there if there is none.

        If this run had an identity in the state folder, that is taken along, and its tickets stay valid. A
        folder with an identity is only read.
        """
        file = folder / IDENTITY_NAME
        is_new = False
        try:
            data = private_files.read_given(file)
        except FileNotFoundError:
            try:
                is_new = private_files.create(file, _earlier(run_id, state) or make_certificate(_COMMON_NAME))
                data = private_files.read_given(file)
            except OSError as error:
                raise StorageError(
                    f"there is no identity in {folder}, and none can be made there: {error.strerror}",
                    code="W5-123",
                    fix=f"make it first, where you may:  w5xde ticket new --offline --identity {folder}"
                    " --advertise HOST",
                ) from error
        fix = "restore it from a copy; or name another folder, and hand out new tickets"
        return cls._of(data, file, is_new, _OURS, fix)

    @classmethod
    def _of(cls, data: bytes, file: Path, is_new: bool, name: re.Pattern[str], fix: str) -> RunIdentity:
        certificate = _read_certificate(data, name, file, fix)
        return cls(
            file=file,
            certificate=certificate.public_bytes(serialization.Encoding.DER),
            fingerprint=certificate.fingerprint(hashes.SHA256()),
            is_new=is_new,
        )


def _earlier(run_id: str, state: Path | None) -> bytes | None:
    """The identity that a run had in the state folder, if it had one."""
    file = (state or private_files.state_folder()) / "runs" / f"{run_id}.pem"
    try:
        return private_files.read(file) if _RUN_ID.fullmatch(run_id) else None
    except (FileNotFoundError, StorageError):
        # A state folder that cannot be used matters no more.
        return None


def make_certificate(
    common_name: str, not_before: dt.datetime = _NOT_BEFORE, not_after: dt.datetime = _NOT_AFTER
) -> bytes:
    """A new key, and a certificate that it signs itself, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    only_to_sign = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(only_to_sign, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def _common_name(run_id: str) -> str:
    return f"w5xde run {run_id}"


def _read_certificate(data: bytes, name: re.Pattern[str], file: Path, fix: str) -> x509.Certificate:
    """Return the certificate, if its key belongs to it and it has such a name: both are for this use."""
    try:
        key = serialization.load_pem_private_key(data, password=None)
        certificate = x509.load_pem_x509_certificate(data)
        subject = certificate.subject.rfc4514_string()
    except (ValueError, TypeError) as error:
        # The library's own message might quote the key.
        raise _damaged(file, "it holds no key and certificate", fix) from error
    if key.public_key() != certificate.public_key():
        raise _damaged(file, "its key and its certificate do not belong together", fix)
    if not name.fullmatch(subject):
        raise _damaged(file, "it belongs to another run, or to another program", fix)
    return certificate


def _damaged(file: Path, what: str, fix: str) -> StorageError:
    return StorageError(f"{file} is damaged: {what}", code="W5-413", fix=fix)
