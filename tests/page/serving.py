"""A page in a process of its own, and a browser that is only a socket."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.processes import PATIENCE_SECONDS, Process, command


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Visitor:
    """Asks a page, as a browser does that has opened its link."""

    process: Process
    url: str
    token: str = ""
    role: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def port(self) -> int:
        found = urlsplit(self.url).port
        assert found is not None
        return found

    @property
    def code(self) -> str:
        return self.url.partition("#c=")[2]

    def connect(self) -> HTTPConnection:
        if self.url.startswith("https"):
            trusting = ssl.create_default_context()
            trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
            return HTTPSConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS, context=trusting)
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)

    def ask(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Ask once; headers are written with underscores, and the token goes along if there is one."""
        connection = self.connect()
        try:
            connection.request(method, path, body, self._headers(headers))
            found = connection.getresponse()
            named = {key.lower(): value for key, value in found.getheaders()}
            return Answer(found.status, named, found.read())
        finally:
            connection.close()

    def _headers(self, given: dict[str, str]) -> dict[str, str]:
        bearer = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return bearer | {key.replace("_", "-"): value for key, value in given.items()}

    def login(self) -> Answer:
        found = self.ask("/api/login", "POST", self.code)
        if found.status == 200:
            self.token, self.role = found.json["token"], found.json["role"]
        return found

    @contextmanager
    def stream(self, run: int = 0, **headers: str) -> Iterator[Iterator[tuple[str, Any, int | None]]]:
        """The events of a stream, as (kind, data, id)."""
        connection = self.connect()
        try:
            connection.request("GET", f"/api/runs/{run}/stream", headers=self._headers(headers))
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield events_of(answer)
        finally:
            connection.close()


def events_of(answer: HTTPResponse) -> Iterator[tuple[str, Any, int | None]]:
    kind, data, number = "", "", None
    for raw in answer:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
        elif line.startswith("id: "):
            number = int(line[4:])
        elif not line and kind:
            yield kind, json.loads(data), number
            kind, data, number = "", "", None


def until(events: Iterator[tuple[str, Any, int | None]], wanted: str) -> tuple[Any, int | None]:
    """The next event of this kind."""
    return next((data, number) for kind, data, number in events if kind == wanted)


@contextmanager
def page(*folders: Path, flags: tuple[str, ...] = (), port: int = 0, **variables: str) -> Iterator[Visitor]:
    """A page of these runs, which nobody has opened yet."""
    words = ["show", *map(str, folders), "--json", "--no-open", "--port", str(port), *flags]
    with command(*words, **variables) as process:
        facts = json.loads(process.wait_for('"url"'))
        yield Visitor(process, facts["url"], facts=facts)


@contextmanager
def opened(*folders: Path, **options: Any) -> Iterator[Visitor]:
    """A page that a browser has opened by its link."""
    with page(*folders, **options) as visitor:
        assert visitor.login().status == 200
        yield visitor
