"""The web application of the page: its files, the login, and what it says of each run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from w5xde.follow.batch_life import life_of_batch
from w5xde.follow.run_follower import RunFollower
from w5xde.page import picture
from w5xde.page.assets import SERVED, content, media_type
from w5xde.page.guard import LOGIN, Guard
from w5xde.page.sessions import Sessions
from w5xde.page.stream import RunWatch, stream
from w5xde.sanitize import to_json

# A code has 32 characters.
CODE_BYTES_MAX = 200


class Page:
    """Answers requests about some runs; the first is shown, the others are compared with it."""

    def __init__(
        self, folders: Sequence[Path], sessions: Sessions, logged_in: Callable[[], None] = lambda: None
    ) -> None:
        self._watches = [RunWatch(RunFollower(folder)) for folder in folders]
        self._sessions = sessions
        self._logged_in = logged_in

    async def read_ahead(self) -> None:
        """Read the runs before a browser asks: a long run takes a second."""
        for watch in self._watches:
            await watch.refresh()

    def app(self, names: Collection[str], *, is_tls: bool) -> ASGIApp:
        """The application, guarded."""
        routes = [Route(path, self._file) for path in SERVED]
        routes += [
            Route(LOGIN, self._login, methods=["POST"]),
            Route("/api/runs", self._runs),
            Route("/api/runs/{run:int}/stream", self._stream),
            Route("/api/runs/{run:int}/history", self._history),
            Route("/api/runs/{run:int}/batches/{epoch:int}/{batch:int}", self._batch),
        ]
        return Guard(Starlette(routes=routes), self._sessions, names, is_tls=is_tls)

    async def _file(self, request: Request) -> Response:
        name = SERVED[request.url.path]
        return Response(content(name), media_type=media_type(name))

    async def _login(self, request: Request) -> Response:
        code = b""
        async for piece in request.stream():
            code += piece
            if len(code) > CODE_BYTES_MAX:
                return PlainTextResponse("no code is that long\n", 413)
        found = self._sessions.login(code.decode("ascii", errors="replace"), time.time())
        if found is None:
            return PlainTextResponse("this link was used before, or is of another page\n", 401)
        self._logged_in()
        return _json({"token": found[0], "role": found[1]})

    def _watch(self, request: Request) -> RunWatch | None:
        number: int = request.path_params["run"]
        return self._watches[number] if number < len(self._watches) else None

    async def _runs(self, request: Request) -> Response:
        return _json({"runs": [watch.run.name for watch in self._watches]})

    async def _stream(self, request: Request) -> Response:
        watch, last_id = self._watch(request), request.headers.get("last-event-id", "")
        if watch is None:
            return _no_run()
        offset = int(last_id) if last_id.isascii() and last_id.isdigit() and len(last_id) < 19 else None
        return StreamingResponse(
            stream(watch, offset), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _history(self, request: Request) -> Response:
        watch = self._watch(request)
        if watch is None:
            return _no_run()
        await watch.refresh()
        run, clock = watch.run, time.time()
        found = {"about": picture.about(run), "history": picture.history(run)}
        return _json(found | {"now": picture.now(run, clock)})

    async def _batch(self, request: Request) -> Response:
        watch = self._watch(request)
        if watch is None:
            return _no_run()
        epoch, batch = request.path_params["epoch"], request.path_params["batch"]
        return _json(await asyncio.to_thread(life_of_batch, watch.run.folder, epoch, batch))


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


def _no_run() -> Response:
    return PlainTextResponse("there is no such run here\n", 404)
