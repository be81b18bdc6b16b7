"""Prints the table of docs/porting.md."""

import tempfile
from pathlib import Path

import torch

from tests.trial.attempt import attempt, attempts, row

torch.set_num_threads(1)
print("| job | brought over by | lines changed | largest difference | same bits for 1, 2, 7 nodes |")
print("|---|---|---|---|---|")
for name, tried in attempts().items():
    with tempfile.TemporaryDirectory() as folder:
        far = attempt(tried.compare, Path(folder))
    print(row(name, tried, f"{far:.0e}"), flush=True)
