"""SIGTERM for a command that takes part in a run: its process ends with exit code 75, soon, at any moment.

    before a run has an event loop     KeyboardInterrupt, once, as Ctrl-C raises it
    while the event loop runs          `interrupts.py` ends the run in order and in a hurry
    whatever happens then              the process ends when the time is up

The time is counted by a thread that the system's own signal handler wakes up, because a main thread that is
in a long call of a library runs no handlers. Imports little: the command must hear SIGTERM from its first
moment on.
"""

from __future__ import annotations

import os
import signal
import threading
import time

# Users are told 20 s; the rest is for a busy machine. Engines give a process 30 s or more to end.
END_SECONDS = 18.0
# The same for a command that was interrupted before its run began: it only has to tidy up. The exception may
# also be lost in a library that was being loaded, and the command go on.
TIDY_SECONDS = 3.0
_LOOK_SECONDS = 0.1
# As `errors.NOT_OVER`, which cannot be imported so early.
NOT_OVER = 75
# The commands that take part in a run.
RUNNING = ("train", "serve", "join")
_LATE = b"stopped: what was under way did not end in time\n"


# That of this process, if it is a command.
_HEARING: list[Termination] = []


def is_running(arguments: list[str]) -> bool:
    """Whether these are the arguments of a command that takes part in a run."""
    return next(iter(arguments), "") in RUNNING


class Termination:
    """Hears SIGTERM in the main thread of this process, until the process ends. Make one."""

    def __init__(self) -> None:
        # The parent at the first moment: later it may have died, and another process have taken its place.
        self.parent = os.getppid()
        self.is_asked = False
        # Whether KeyboardInterrupt was raised.
        self._is_interrupted = False
        # Set when the command only has to end: SIGTERM interrupts nothing then.
        self.is_ending = False
        _HEARING.append(self)
        signal.signal(signal.SIGTERM, self._handle)
        if not hasattr(os, "register_at_fork"):
            return
        self._wakes, written = os.pipe()
        os.set_blocking(written, False)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._end_in_time, name="w5xde-termination", daemon=True).start()

    def _handle(self, number: int, frame: object) -> None:
        if not self._is_interrupted and not self.is_ending:
            self._is_interrupted = self.is_asked = True
            raise KeyboardInterrupt

    def _end_in_time(self) -> None:
        while signal.SIGTERM not in os.read(self._wakes, 4096):
            pass
        self.is_asked = True
        waited = 0.0
        while waited < (TIDY_SECONDS if self._is_interrupted else END_SECONDS):
            time.sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
        os.write(2, _LATE)
        os._exit(NOT_OVER)


def note_orderly_end() -> None:
    """A run has heard SIGTERM and ends in order: what follows is not to be interrupted either."""
    for termination in _HEARING:
        termination.is_ending = True


def _forget() -> None:
    """In a forked child: a signal that it gets does not concern its parent, and SIGTERM ends it."""
    _HEARING.clear()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
