"""The lookout: whether the cluster still knows an actor, and whether its host is about to be taken away.

Ray tells none of this by itself. An actor that its cluster has forgotten (the head was restarted without
storage) would work on for nobody; one on a host that will be preempted can still end in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from enum import Enum

import ray
from ray._private.state import state
from ray.exceptions import AuthenticationError

NAMESPACE = "w5xde"
# Soon enough for a warning of 30 s, and nothing for the head to answer.
LOOK_SECONDS = 1.0
# Ray ends every process that has not reached the head for so long; its own default.
_RECONNECT_VARIABLE, _RECONNECT_SECONDS = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
# The share of that time after which we end in order: what is left is enough for it.
_PATIENCE = 0.6


class Trouble(Enum):
    """Why an actor must end its command."""

    DRAINED = "its host is about to be taken away"
    FORGOTTEN = "the cluster has forgotten this run: its head was restarted without storage"
    HEADLESS = "the head of the cluster does not answer"


class Lookout:
    """Looks every second on threads of its own, and raises the alarm once."""

    def __init__(self, name: str, alarm: Callable[[Trouble], None]) -> None:
        self._name = name
        self._alarm = alarm
        self._node_id = ray.get_runtime_context().get_node_id()
        self._heard_at = time.monotonic()
        self._has_raised = threading.Event()
        for work in (self._look, self._count_silence):
            threading.Thread(target=work, daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._has_raised.set()

    def _raise(self, trouble: Trouble) -> None:
        if not self._has_raised.is_set():
            self._has_raised.set()
            self._alarm(trouble)

    def _look(self) -> None:
        while not self._has_raised.wait(LOOK_SECONDS):
            try:
                # Waits while the head does not answer.
                ray.get_actor(self._name, namespace=NAMESPACE)
                draining = state.get_draining_nodes() or {}
            except (ValueError, AuthenticationError):
                self._raise(Trouble.FORGOTTEN)
                return
            except Exception:
                # Whatever it was, the next look will tell.
                continue
            self._heard_at = time.monotonic()
            if self._node_id in draining:
                self._raise(Trouble.DRAINED)

    def _count_silence(self) -> None:
        while not self._has_raised.wait(LOOK_SECONDS):
            if time.monotonic() - self._heard_at > silence_max_seconds():
                self._raise(Trouble.HEADLESS)


def silence_max_seconds() -> float:
    """How long the head of the cluster may be silent before we end in order."""
    try:
        return _PATIENCE * float(os.environ.get(_RECONNECT_VARIABLE, _RECONNECT_SECONDS))
    except ValueError:
        return _PATIENCE * _RECONNECT_SECONDS
