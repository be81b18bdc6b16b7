"""A real pool to be attacked: a coordinator in a process of its own, with a node of its own that trains."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import w5xde
from tests.system import jobs
from tests.system.harness import JOBS, PATIENCE_SECONDS, ended, events, forked, when_there
from w5xde.learn.job.node_setup import prepare_node
from w5xde.messages import Hello, Message, Ready, Welcome
from w5xde.protocol.wire import Body, Decoder, Limits, encode
from w5xde.runtime.admission.register import TicketRegister
from w5xde.runtime.net import tls
from w5xde.ticket import Secret, Ticket, parse

HERE = "127.0.0.1"
ANSWER_LIMITS = Limits(1 << 20, 1 << 24)


@dataclass
class Attacked:
    """A run that goes on while tests attack it."""

    folder: Path
    ticket: Ticket
    pid: int
    settings: dict[str, Any]

    @property
    def port(self) -> int:
        return self.ticket.addresses[0][1]

    @property
    def register(self) -> TicketRegister:
        return TicketRegister(self.folder)

    def metrics(self) -> dict[str, Any]:
        """The newest line of them, of which there is one a second."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {"step": 0, "seconds": 0.0, "batches": 0}
        return found

    def step(self) -> int:
        """How far it is."""
        return int(self.metrics()["step"])

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.step() >= step, lambda: f"still at step {self.step()}")

    def metrics_after(self, seconds: float) -> dict[str, Any]:
        """The first that are seen of a later second of the run."""
        wait_until(lambda: self.metrics()["seconds"] > seconds, lambda: f"nothing new after {seconds} s")
        return self.metrics()

    def stop(self) -> dict[str, Any]:
        os.kill(self.pid, signal.SIGINT)
        assert ended(self.pid) == 0
        found: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())["result"]
        return found

    def stop_and_compare(self, runs: Path) -> dict[str, Any]:
        """End it; its weights are those of a run of as many steps that nobody attacked."""
        self.wait_for_step(1)
        result = self.stop()
        alone = {**self.settings, "host": HERE, "name": "alone", "steps": result["steps"], "epochs": None}
        again = w5xde.train(f"{JOBS}:job", runs=str(runs), **{**alone, "ticket_file": None})
        assert again.summary["weights_sha256"] == result["weights_sha256"]
        return result

    def told(self) -> str:
        return str(events(self.folder))

    def wait_until_told(self, text: str) -> None:
        wait_until(lambda: text in self.told(), lambda: f"{text!r} is not in {self.told()[-2000:]}")


def wait_until(is_so: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Until another process has done something that can only be looked at."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)


@contextmanager
def attacked(tmp_path: Path, **more: Any) -> Iterator[Attacked]:
    """A run that trains over TLS, dialled at this machine's own address."""
    settings = {"host": "0.0.0.0", "nodes": 1, "epochs": 9999, "batch_size": 6, "batches_per_step": 4, **more}
    file = tmp_path / "ticket"
    settings |= {"ticket_file": str(file), "name": "mine", "port": 0}
    job = more.pop("job", f"{JOBS}:slow")
    settings.pop("job", None)
    with forked(lambda: w5xde.serve(job, runs=str(tmp_path), **settings)) as pid:
        ticket = parse(when_there(file).read_text())
        here = replace(ticket, addresses=((HERE, ticket.addresses[0][1]),))
        yield Attacked(tmp_path / "mine", here, pid, settings)


class Stranger:
    """A connection made by hand, from an address of its own on this machine."""

    _count = 0

    def __init__(
        self, run: Attacked, *, source: str = "", host: str = HERE, context: ssl.SSLContext | None = None
    ) -> None:
        Stranger._count += 1
        source = source or f"127.0.{1 + Stranger._count // 200}.{1 + Stranger._count % 200}"
        near = (source, 0) if host == HERE else None
        self.sock = socket.create_connection((host, run.port), 10, near)
        self._run = run
        if not run.ticket.is_clear:
            self.sock = (context or tls.inspection_context()).wrap_socket(self.sock)
        self._decoder = Decoder(ANSWER_LIMITS)
        self._frames: list[tuple[Message, Body]] = []
        # What came with the last message.
        self.body: Body = bytearray()

    def say(self, *messages: Message, body: bytes = b"") -> None:
        self.sock.sendall(b"".join(encode(message, len(body)) for message in messages) + body)

    def greet(self, **changes: Any) -> None:
        proof = self._run.ticket.id + self._run.ticket.secret.reveal()
        fields = {"protocol": 1, "package": "0", "name": "stranger", "ticket": proof}
        self.say(Hello(**{**fields, **changes}))

    def hear(self) -> Message | None:
        """The next message; None: the other side hung up."""
        while not self._frames:
            try:
                count = self.sock.recv_into(self._decoder.get_buffer())
            except (ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return None
            if not count:
                return None
            self._frames += self._decoder.buffer_updated(count)
        message, self.body = self._frames.pop(0)
        return message

    def get_ready(self, spoil: Callable[[bytes], bytes] = lambda proof: proof) -> None:
        """After a greeting: prove itself like anybody else, or not quite."""
        welcome = self.hear()
        assert isinstance(welcome, Welcome)
        parts = prepare_node(jobs.job, welcome, torch.device("cpu"))
        parts.prove(welcome, self.body)
        assert parts.proof is not None
        self.say(Ready(parts.layout_digest), body=spoil(bytes(parts.proof.body)))

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def other_secret(ticket: Ticket) -> Ticket:
    return replace(ticket, secret=Secret(bytes(16)))
