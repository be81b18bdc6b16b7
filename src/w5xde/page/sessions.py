"""Who may look: one-time codes, and the bearer tokens that browsers get for them.

A code is spent by its first use. Of a token, a private file keeps the hash, so that a browser stays logged in
when the page is started again; it counts for the same runs alone, and for thirty days. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from w5xde.runtime.admission import private_files

Role = Literal["operator", "viewer"]

TOKEN_SECONDS = 30 * 24 * 3600.0
# More than a person's browsers; the oldest go first.
TOKENS_MAX = 200
FOLDER, FILE = "page", "sessions.json"


class _Session(msgspec.Struct, frozen=True):
    sha256: str
    role: Role
    until: float
    # The ids of the runs that may be seen with it.
    runs: list[str]


class Sessions:
    """The codes and tokens for one set of runs."""

    def __init__(self, runs: Sequence[str], state: Path | None = None) -> None:
        self._runs = sorted(runs)
        self._folder = private_files.make_folder(state or private_files.state_folder(), FOLDER)
        self._codes: dict[str, Role] = {}
        self._known = {each.sha256: each for each in self._read()}

    def new_code(self, role: Role) -> str:
        """A code that can be used once."""
        code = secrets.token_urlsafe(24)
        self._codes[_hash(code)] = role
        return code

    def login(self, code: str, now: float) -> tuple[str, Role] | None:
        """Spend a code; returns a token and its role, or None if the code is unknown or spent."""
        role = self._codes.pop(_hash(code), None)
        if role is None:
            return None
        token = secrets.token_urlsafe(32)
        session = _Session(_hash(token), role, now + TOKEN_SECONDS, self._runs)
        self._known[session.sha256] = session
        self._keep(session, now)
        return token, role

    def role_of(self, token: str, now: float) -> Role | None:
        """The role of a token's owner; None for a token that does not count here."""
        session = self._known.get(_hash(token))
        if session is None or session.until < now or session.runs != self._runs:
            return None
        return session.role

    def _read(self) -> list[_Session]:
        try:
            data = private_files.read(self._folder / FILE)
            return msgspec.json.decode(data, type=list[_Session])
        except (FileNotFoundError, msgspec.DecodeError):
            return []  # all have to log in again

    def _keep(self, session: _Session, now: float) -> None:
        # Pages of other runs use the same file.
        with private_files.locked(self._folder / "lock"):
            kept = [each for each in self._read() if each.until > now]
            data = msgspec.json.encode([*kept, session][-TOKENS_MAX:])
            private_files.replace(self._folder / FILE, data)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
