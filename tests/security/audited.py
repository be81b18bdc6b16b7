"""A whole training and a corpus of bad bytes, while Python itself tells of everything that could run code.

`python -m tests.security.audited` exits with 1 if, while a message or a file was being decoded, anything was
imported, compiled, executed, unpickled or started. Decoders are wrapped, so that the hook knows when that is;
it is inherited by the nodes, which are forked, and what it sees anywhere goes to one file. No `assert` here.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import marshal
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FORBIDDEN = {
    "pickle.find_class", "marshal.loads", "compile", "exec", "import", "subprocess.Popen", "os.system",
    "os.exec", "os.posix_spawn", "ctypes.dlopen",
}  # fmt: skip


class Watch:
    """Is told of every audit event; those that are forbidden while a decoder runs are kept, and stopped."""

    def __init__(self, log: Path) -> None:
        self._file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log = log
        self._decoding = threading.local()
        self.is_on = False
        self.decoded = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        # Nothing that could raise an event of its own may be here.
        if self.is_on and event in FORBIDDEN and self._depth:
            os.write(self._file, f"{event} {str(args[0])[:80] if args else ''}\n".encode())
            raise PermissionError(f"{event} while a message or a file is decoded")

    @property
    def _depth(self) -> int:
        return self._decoding.__dict__.get("depth", 0)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        self._decoding.depth = self._depth + 1
        self.decoded += 1
        try:
            yield
        finally:
            self._decoding.depth -= 1

    def wrap(self, owner: Any, name: str) -> None:
        """Let the decoder say when it is at work."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def watched(*args: Any, **named: Any) -> Any:
            with self.decoding():
                return inner(*args, **named)

        setattr(owner, name, watched)

    def seen(self) -> list[str]:
        return self._log.read_text().splitlines()


def wrap_decoders(watch: Watch) -> None:
    """Everything that reads what a peer or a file says. Where a name was imported, there it is replaced."""
    from w5xde.learn.codecs.pipeline import CodecPipeline
    from w5xde.learn.codecs.receiver import CodecReceiver
    from w5xde.learn.data.payload import Unpacker
    from w5xde.learn.job.code.bundle import CodeBundle
    from w5xde.learn.step import checkpoint
    from w5xde.protocol.session import Session
    from w5xde.protocol.wire import Decoder
    from w5xde.runtime.durable import checkpoints as store
    from w5xde.runtime.durable import ledger_segments as ledger
    from w5xde.runtime.durable import step_log as steplog
    from w5xde.runtime.evaluation import export

    for owner, name in (
        (Decoder, "buffer_updated"),
        (Session, "hear"),
        (Unpacker, "unpack"),
        (CodeBundle, "from_offer"),
        (CodecPipeline, "decode"),
        (CodecReceiver, "decode"),
        (store.CheckpointStore, "read"),
        (store, "parse"),
        (ledger, "parse"),
        (steplog, "parse"),
        (checkpoint, "restore"),
        (checkpoint, "restore_weights"),
        (export, "load"),
    ):
        watch.wrap(owner, name)


def replay() -> None:
    """Every lie, and a few hundred examples of every property."""
    from tests.security.lies import LIES
    from tests.security.measure import refusal_of
    from tests.security.properties import PROPERTIES

    for lie in LIES.values():
        refusal_of(lie.tell)
    for found in PROPERTIES.values():
        found.run(30)


def train(folder: str, name: str) -> None:
    """Two nodes, compressed both ways, and once more from the checkpoint."""
    import w5xde
    from tests.processes import JOBS

    settings: dict[str, Any] = {"nodes": 2, "runs": folder, "log": "silent", "compress": "zlib:1"}
    w5xde.train(f"{JOBS}:job", epochs=1, name=name, **settings)
    w5xde.train(f"{JOBS}:job", epochs=2, resume=name, nodes=2, runs=folder, log="silent")


# What an attacker would like to happen, to see that each would be seen.
HARM: dict[str, Callable[[], object]] = {
    "pickle.find_class": lambda: pickle.loads(b"cos\nsystem\n."),
    "marshal.loads": lambda: marshal.loads(marshal.dumps(1)),
    "compile": lambda: compile("1", "peer", "eval"),
    "exec": lambda: exec(_CODE),
    "import": lambda: __import__("this"),
    "subprocess.Popen": lambda: subprocess.run(["true"], check=False),
    "os.system": lambda: os.system("true"),
    "ctypes.dlopen": lambda: ctypes.CDLL("libm.so.6"),
}
_CODE = compile("1", "peer", "eval")


def blind_spots(watch: Watch) -> list[str]:
    """Which harm would not be seen."""
    missed = []
    for event, harm in HARM.items():
        before = len(watch.seen())
        with suppress(Exception), watch.decoding():
            harm()
        if not any(line.startswith(f"{event} ") for line in watch.seen()[before:]):
            missed.append(event)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.audited")
    parser.add_argument(
        "--break-it", action="store_true", help="let a decoder run code, to see that it is seen"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        watch = Watch(Path(folder) / "seen")
        if given.break_it:
            _break_unpacker()
        wrap_decoders(watch)
        # Once unwatched: what libraries import when they are first used is not the peer's doing.
        train(folder, "before")
        replay()
        watch.is_on, watch.decoded = True, 0
        is_done = False
        try:
            train(folder, "watched")
            replay()
            is_done = True
        except Exception as error:
            # What is seen is also stopped, which may end in any error.
            print(f"it broke off: {type(error).__name__}: {error}")
        seen, decoded, missed = watch.seen(), watch.decoded, blind_spots(watch)
        print(f"decoded {decoded:,} times; seen: {'; '.join(seen[:9]) or 'nothing'}; ", end="")
        print(f"blind to: {missed or 'nothing'}")
        return 0 if is_done and not seen and not missed else 1


def _break_unpacker() -> None:
    from w5xde.learn.data.payload import Unpacker

    inner = Unpacker.unpack

    def unpack(self: Unpacker, *args: Any, **named: Any) -> Any:
        HARM["compile"]()
        return inner(self, *args, **named)

    Unpacker.unpack = unpack  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
