"""The page's own key and certificate, for browsers on other machines.

    STATE/page/page.pem      key and certificate

Apart from the keys of runs: whoever breaks into a page must not become a coordinator. Made anew before it
expires; browsers ask their users about it, who compare its fingerprint with the one on the terminal.
"""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from w5xde.page.sessions import FOLDER
from w5xde.runtime.admission import private_files
from w5xde.runtime.admission.identity import make_certificate

FILE = "page.pem"
# Browsers accept a year and a little.
VALID = dt.timedelta(days=390)
RENEWED_BEFORE = dt.timedelta(days=30)


class PageIdentity(NamedTuple):
    """The file with both, and the sha256 of the certificate."""

    file: Path
    fingerprint: bytes


def load_or_create(now: dt.datetime, state: Path | None = None) -> PageIdentity:
    """The identity of this user's pages."""
    folder = private_files.make_folder(state or private_files.state_folder(), FOLDER)
    file = folder / FILE
    with private_files.locked(folder / "lock"):
        certificate = _read(file)
        if certificate is None or certificate.not_valid_after_utc - now < RENEWED_BEFORE:
            data = make_certificate("w5xde page", now - dt.timedelta(days=1), now + VALID)
            private_files.replace(file, data)
            certificate = x509.load_pem_x509_certificate(data)
    return PageIdentity(file, certificate.fingerprint(hashes.SHA256()))


def _read(file: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(private_files.read(file))
    except (FileNotFoundError, ValueError):
        return None
