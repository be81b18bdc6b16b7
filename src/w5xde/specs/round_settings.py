"""The settings of rounds mode: what they may be, and what they mean. Knows no other settings."""

from __future__ import annotations

from typing import TypeAlias

from w5xde.compression import AUTO, AUTO_LOSSY, Directions, parse_compress
from w5xde.specs.round_lengths import GROWTH_STEPS, ROUND_STEPS_MAX, RoundLengths
from w5xde.specs.setting_error import SettingError

# The setting `local-steps`, as the user gives it.
LocalSteps: TypeAlias = int | str | None

ROUNDS = "rounds"
# A step has as many batches as a round has columns, which nodes compute at the same time.
ROUND_COLUMNS = 4
# By default rounds grow up to so many steps: measured (docs/findings.md, "Rounds").
ROUND_STEPS_USUAL = 20
# With `auto`: longer rounds need more samples than they save time.
AUTO_STEPS_MAX = 200
# The codec of both directions, if the user names none.
ROUND_CODEC = "q4 | zstd:1"


def require_local_steps(mode: str, local_steps: LocalSteps, rate: float | None) -> None:
    """Refuse values of `local-steps` and `round-rate` that make no sense in this mode; ValueError."""
    said = None if local_steps is None else str(local_steps)
    if mode != ROUNDS:
        if rate is not None:
            raise SettingError(
                f"round-rate is for mode rounds, and the mode is {mode}",
                fix="leave it out, or use mode rounds",
            )
        if said not in (None, "on", "off"):
            raise SettingError(
                f"local-steps {said} is for mode rounds; in mode {mode} it is on or off",
                fix="leave it out, or use mode rounds",
            )
        return
    if rate is not None and not 0 < rate < float("inf"):
        raise ValueError(f"round-rate {rate} must be a positive number")
    if said is not None and said not in ("grow", "auto") and not said.startswith("@") and not _is_form(said):
        raise ValueError(
            f"local-steps {said} must be grow, auto, @RUN or a number from 1 to {ROUND_STEPS_MAX} in mode"
            " rounds"
        )


def _is_form(said: str) -> bool:
    try:
        RoundLengths.parse(said)
    except ValueError:
        return False
    return True


def round_lengths(said: LocalSteps) -> RoundLengths:
    """How many steps each round has.

    With `auto`, as at first: the run finds the most that is useful.
    """
    if said is not None and _is_form(str(said)):
        return RoundLengths.parse(str(said))
    return RoundLengths(ROUND_STEPS_USUAL, GROWTH_STEPS)


def round_steps_max(said: LocalSteps) -> int:
    """The most steps that a round may have."""
    lengths = round_lengths(said)
    return max(lengths.most, AUTO_STEPS_MAX) if said == "auto" else lengths.most


def round_directions(setting: str) -> Directions:
    """The codec of each direction; ValueError if weights would depend on which node computed what."""
    found = parse_compress(setting, both_ways=True)
    for spec in (found.up, found.down):
        if spec == AUTO_LOSSY or "int8" in spec:
            why = "chooses by the link" if spec == AUTO_LOSSY else "sends its errors later"
            raise SettingError(
                f"compress {spec} {why}, so that weights would depend on which node computed what",
                fix=f"in mode rounds use auto ({ROUND_CODEC}), or other stages like bf16 or none",
            )
    return Directions(*(ROUND_CODEC if spec == AUTO else spec for spec in (found.up, found.down)))
