"""What every test needs: one torch thread, from the first to the last.

Sums are split by the number of threads; and a process whose main thread ever used several cannot fork one
that uses several again (the library for threads does not survive it), as runs with `threads=2` do.
"""

from __future__ import annotations

import torch

torch.set_num_threads(1)
