"""Where a node's job comes from: the hash of the code that its coordinator sent, and the versions used here.

Compares both with what each welcome says: a coordinator that was started anew may have another job. Knows no
connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from w5xde.errors import JoinError
from w5xde.learn.job.code.packages import differences, differences_text
from w5xde.messages import Welcome


@dataclass(slots=True)
class JobOrigin:
    """The origin of one node's job. The hash is empty if the node has its own copy.

    `versions` are empty if nobody compares them: a local node runs with those of its coordinator.
    """

    sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    # Those of the versions that were not the coordinator's, by its last welcome.
    differing: dict[str, str] = field(default_factory=dict)

    def compare(self, welcome: Welcome, device: str) -> str:
        """Compare with a welcome; returns a sentence if other versions differ than before, else nothing.

        JoinError if the coordinator has other code by now. `device` is the kind on which this node computes.
        """
        if self.sha256 not in ("", welcome.code):
            now = f"it is {welcome.code} now" if welcome.code else "it offers none now"
            raise JoinError(
                f"the coordinator's job has changed: this node runs sha256 {self.sha256}, and {now}",
                code="W5-289",
                why="nobody here has agreed to run the new code",
                fix="join again:  w5xde join TICKET  shows it and asks",
            )
        before, self.differing = self.differing, differences(self.versions, welcome.versions, device)
        if not self.differing or self.differing == before:
            return ""
        found = differences_text(self.differing, welcome.versions, "there")
        return f"other versions than the coordinator's, which can change bits: {found}"
