"""Two liars of eight, in real processes. The whole table: `python -m tests.security.byzantine`."""

from __future__ import annotations

import pytest

from tests.security.byzantine import BOTH, LIARS, LOSS_MARGIN, PLAIN, TRIMMED, Ending, train

EPOCHS = 6


@pytest.fixture(scope="module")
def clean() -> Ending:
    return train(epochs=EPOCHS, **BOTH)


def test_honest_nodes_are_left_alone(clean: Ending) -> None:
    assert (clean.liars_out, clean.honest_out) == (0, 0)
    assert clean.summary["degraded_steps"] == 0


# They lie at once, so that when they are found out is no matter of chance.
@pytest.mark.parametrize("lie", ["sign flipped", "zeros", "an old one"])
def test_liars_are_turned_out_and_the_loss_is_that_of_an_honest_pool(lie: str, clean: Ending) -> None:
    end = train(lie, honest_batches=0, epochs=EPOCHS, **BOTH)
    assert (end.liars_out, end.honest_out, end.is_finite) == (LIARS, 0, True)
    assert end.loss < (1 + LOSS_MARGIN) * clean.loss


def test_what_would_destroy_a_model_is_bounded_even_if_nobody_is_found_out() -> None:
    """Both pull the other way, six times as hard: too little for the limit of norms."""
    lie = "against, as large as is believed"
    ruined = train(lie, honest_batches=0, epochs=EPOCHS, **PLAIN)
    trimmed = train(lie, honest_batches=0, epochs=EPOCHS, **TRIMMED)
    # A model that knows nothing has a loss of 2.3.
    assert ruined.loss > 2.0
    # The gradients of a ruined model explode, so that some liars may be found out there, by chance.
    assert trimmed.liars_out == 0
    assert trimmed.loss < 1.5
