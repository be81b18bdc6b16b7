"""What is said of a pool that has more nodes than a step has batches."""

from __future__ import annotations

import pytest

from w5xde.control.membership import outgrown_text


@pytest.mark.parametrize(
    ("nodes", "batches", "parallel", "told"),
    [
        (5, 4, 5, (
            "5 nodes, 4 batches a step: 1 node has nothing to do; a new run with --batches-per-step 5 would"
            " use it"
        )),
        (8, 4, 6, (
            "8 nodes, of which 6 can compute at once, 4 batches a step: 2 nodes have nothing to do; a new run"
            " with --batches-per-step 6 would use them"
        )),
        (8, 2, 8, (
            "8 nodes, 2 batches a step: 6 nodes have nothing to do; a new run with --batches-per-step 8 would"
            " use them, or --threads 4 on fewer nodes"
        )),
        (8, 4, 4, (
            "8 nodes, of which 4 can compute at once, 4 batches a step: more batches a step would gain"
            " nothing"
        )),
    ],
)  # fmt: skip
def test_only_nodes_that_could_compute_are_told_to_be_idle(
    nodes: int, batches: int, parallel: int, told: str
) -> None:
    assert outgrown_text(nodes, batches, parallel) == told
