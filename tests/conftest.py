"""What every test needs: one torch thread, from the first to the last, and keys of its own.

Sums are split by the number of threads; and a process whose main thread ever used several cannot fork one
that uses several again (the library for threads does not survive it), as runs with `threads=2` do.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

import torch

torch.set_num_threads(1)

# Not the user's: every process that a test starts finds this too. Short, as it is made once for all tests.
_STATE = tempfile.mkdtemp(prefix="w5xde-tests-")
os.environ["W5XDE_STATE"] = _STATE
os.environ["W5XDE_CACHE"] = f"{_STATE}/cache"


def _remove(owner: int = os.getpid()) -> None:
    # Not by processes that were forked from us.
    if os.getpid() == owner:
        shutil.rmtree(_STATE, ignore_errors=True)


atexit.register(_remove)
