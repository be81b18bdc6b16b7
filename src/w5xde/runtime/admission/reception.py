"""Reception: answers a greeting, with an admission or with a refusal and its reason.

Until a node has proved its identity, it learns nothing but why it is refused. Knows no peers, and sends
nothing: the caller is given the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import w5xde
from w5xde.control.pool.connection_limits import ConnectionLimits
from w5xde.errors import StorageError
from w5xde.messages import PROTOCOL_VERSION, Hello, Refuse
from w5xde.runtime.admission.bans import Bans
from w5xde.runtime.admission.gatekeeper import Admission, Gatekeeper
from w5xde.runtime.admission.register import Refused
from w5xde.runtime.net.listener import Candidate

Answered = Callable[[Admission | Refuse], None]


class Reception:
    """Answers the greetings of one run. `log(where, kind, reason)` is called if the register fails."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        bans: Bans,
        limits: ConnectionLimits,
        log: Callable[[str, str, str], None],
    ) -> None:
        self._gatekeeper = gatekeeper
        self._bans = bans
        self._limits = limits
        self._log = log

    def greet(self, hello: Hello, candidate: Candidate, answered: Answered) -> None:
        """Call `answered` once it is known whether this node may join, at once or later."""
        if hello.protocol != PROTOCOL_VERSION:
            what = f"this node speaks protocol {hello.protocol}, the run needs {PROTOCOL_VERSION}"
            fix = f"install w5xde {w5xde.__version__} on both machines"
            answered(Refuse("W5-107", what, fix=fix))
            return
        local = self._gatekeeper.local_node(hello)
        if local is None:
            asked = self._gatekeeper.admit(hello, candidate.address)
            asked.add_done_callback(lambda done: self._looked_up(candidate, done, answered))
            return
        banned = self._bans.of_local_node(local.name or hello.name)
        answered(Refuse("W5-114", f"this node is banned from the run: {banned}") if banned else local)

    def _looked_up(self, candidate: Candidate, done: asyncio.Future[Admission], answered: Answered) -> None:
        """The register has answered."""
        if done.cancelled():
            return
        answer: Admission | Refuse
        try:
            answer = done.result()
        except Refused as refused:
            # Not counted against this machine's own address: local nodes of a killed coordinator still try to
            # reach it, and must not lock out those of the next one.
            if refused.kind in ("unknown", "wrong secret") and not candidate.is_here:
                self._limits.failed(candidate.address, asyncio.get_running_loop().time())
            answer = Refuse(refused.code, refused.what, refused.why, refused.fix)
        except StorageError as error:
            self._log("the register", error.code, error.what)
            # Without the path of the folder, which a stranger must not learn.
            answer = Refuse(error.code, "the coordinator cannot use its register of tickets")
        answered(answer)
