"""What a node says about its own work decides nothing: a batch weighs what we counted.

Unless the job weighs its batches: then a node says what they weigh, and only then it may.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.learn.jobs import make, mlp, settings
from tests.learn.summing import whole_step
from w5xde.learn.job.coordinator_setup import prepare
from w5xde.learn.step.learner import Learner
from w5xde.learn.step.sums import Contribution
from w5xde.messages import Answer, Update


def test_a_node_has_no_words_for_how_much_it_weighs_unless_the_job_asks_for_them() -> None:
    said = {*Answer.__struct_fields__, *Update.__struct_fields__}
    assert said == {
        "lease", "loss_sum", "seconds", "absent", "dropped", "failure", "codec", "body_bytes",
        "version", "answers", "waited_seconds", "core_seconds", "codec_seconds", "network_seconds", "link",
        # Which samples it keeps, norms for advice, and whether it needs the parameters anew.
        "stored", "missing", "squares", "differs",
        # What its batches weigh, if the job has a weight= for them; else the update is refused.
        "weights",
        # What it measured in the batches of a validation set: never part of a step.
        "metrics",
    }  # fmt: skip


def learned(loss_sum: float) -> Learner:
    prepared = prepare(make(mlp()), settings())
    learner = prepared.learner
    vector = learner.flat.blueprint.new_vector()
    vector.raw.zero_()
    vector.parts[0].copy_(torch.linspace(-1, 1, vector.parts[0].numel()))
    given = Contribution(vector, frozenset(), loss_sum, learner.gauge.norm(vector))
    learner.apply(whole_step(prepared.sums, 0, given))
    return learner


@pytest.mark.parametrize("loss_sum", [-1e29, 1e29, math.nan, math.inf])
def test_what_a_node_says_of_its_loss_changes_no_weight(loss_sum: float) -> None:
    assert learned(loss_sum).weights_sha256() == learned(1.0).weights_sha256()
