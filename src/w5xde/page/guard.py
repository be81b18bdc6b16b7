"""The guard of the page: which requests are answered at all, and the headers that every answer has.

    Host             an address, localhost or this machine's name; else 421, against DNS rebinding
    Sec-Fetch-Site   same-origin or none; else 403: another site's page asks
    Origin           of anything but GET: our own; else 403
    Authorization    below /api/ but for /api/login: a bearer token; else 401. Viewers may only read: 403

There is no cookie: cookies do not know ports, so that another program on this machine would be sent ours.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Collection

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from w5xde.page.sessions import Sessions

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
LOGIN = "/api/login"
# Of those, nothing is changed.
READING = {"GET", "HEAD"}


class Refusal(Exception):
    """A request that is not answered: the status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Guard:
    """Wraps the application of the page."""

    def __init__(self, app: ASGIApp, sessions: Sessions, names: Collection[str], *, is_tls: bool) -> None:
        """`names` are those of this machine, in lower case."""
        self._app = app
        self._sessions = sessions
        self._names = names
        self._scheme = "https" if is_tls else "http"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        try:
            self._check(scope)
        except Refusal as refusal:
            return await PlainTextResponse(f"{refusal}\n", refusal.status)(scope, receive, sending)
        return await self._app(scope, receive, sending)

    def _check(self, scope: Scope) -> None:
        given = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        method, path, host = scope["method"], scope["path"], given.get("host", "")
        if not self._is_ours(host):
            raise Refusal(421, "this page does not answer by that name")
        if given.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Refusal(403, "another site asks")
        if method not in READING and given.get("origin") not in (None, f"{self._scheme}://{host}"):
            raise Refusal(403, "another origin asks")
        if path.startswith("/api/") and path != LOGIN:
            token = given.get("authorization", "").removeprefix("Bearer ")
            role = self._sessions.role_of(token, time.time())
            if role is None:
                raise Refusal(401, "log in by the link that  w5xde show  prints")
            if method not in READING and role != "operator":
                raise Refusal(403, "this link may only look")

    def _is_ours(self, host: str) -> bool:
        """Whether a Host names an address or this machine: no other name can lead here by itself."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self._names
        return True
