"""The state of a learner as whole files, for tests that compare, restore or change them."""

from __future__ import annotations

from w5xde.learn.step.checkpoint import LearnerState


def content_of(state: LearnerState) -> dict[str, bytes]:
    return {name: b"".join(pieces) for name, pieces in state.files().items()}
