"""Predicts for which share of its time a node computes, from its step, its model and its link.

    share = computing / (computing + talking)

Knows no sockets, tensors or clocks: the caller has measured everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from w5xde.specs.round_settings import ROUND_STEPS_USUAL, ROUNDS

# In sync mode a gradient and the parameters travel at each step. Lossless codecs save about a tenth of their
# bytes: 3.6 of the 4 of a float32 are left.
SYNC_PART = 0.9
# In mode rounds a difference travels in both directions after each round: about 0.45 bytes a parameter in 4
# bits, with scales and statistics, after zstd.
ROUND_BYTES_PER_PARAMETER = 0.45
# Rounds need up to so many times the samples of sync mode, so that they must use a machine so much better.
ROUNDS_SAMPLES = 1.25
# Below this share most of the machine's time is lost in either mode.
SHARE_FEW = 0.5
# Two directions that differ by less than this are shown as one.
ALIKE = 1.2
# What the batches of a run cost is worth a word if without them the share would be larger by this.
BATCHES_COUNT = 0.05

# What is known of a number: itself, or only that the true one is at least or at most as large.
Bound = Literal["about", "at least", "at most"]
_SPEED_WORDS: dict[Bound, str] = {"about": "", "at least": "more than ", "at most": "less than "}


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """How many bytes a second one direction of a link carries."""

    bytes_per_second: float
    bound: Bound = "about"

    def __str__(self) -> str:
        mbit = self.bytes_per_second * 8 / 10**6
        number = f"{mbit:,.0f}" if mbit >= 10 else f"{mbit:.2g}"
        return f"{_SPEED_WORDS[self.bound]}{number} Mbit/s"


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between a node and its coordinator, as the node sees it."""

    down: MeasuredRate
    up: MeasuredRate
    round_trip_seconds: float

    @property
    def bound(self) -> Bound:
        """What is known of shares: they grow with the rates."""
        bounds: set[Bound] = {self.down.bound, self.up.bound} - {"about"}
        return bounds.pop() if len(bounds) == 1 else "about"

    def talk_seconds(self, bytes_each_way: float, bytes_more_down: float = 0.0) -> float:
        """How long it takes to send so many bytes and to get as many, and some more, back."""
        down = (bytes_each_way + bytes_more_down) / self.down.bytes_per_second
        return bytes_each_way / self.up.bytes_per_second + down + self.round_trip_seconds

    def __str__(self) -> str:
        rates = sorted((self.down.bytes_per_second, self.up.bytes_per_second))
        trip = f"{self.round_trip_seconds * 1000:.2g} ms"
        if self.down.bound == self.up.bound and rates[1] < ALIKE * rates[0]:
            return f"{MeasuredRate(rates[0], self.down.bound)} and {trip}"
        return f"{self.down} down, {self.up} up and {trip}"


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One optimizer step on this machine, and what the run sends for it."""

    seconds: float
    # What is trained: numbers, and their bytes.
    parameters: int
    parameter_bytes: int
    # Samples and bytes of the batch. Bytes are 0 if batches are not sent, because nodes read or keep samples.
    samples: int
    batch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The shares of the time in which this machine would compute, in each mode."""

    step: TimedStep
    link: MeasuredLink
    round_steps: int = ROUND_STEPS_USUAL

    @property
    def sync(self) -> float:
        """In sync mode: a node talks at each step."""
        step = self.step
        talk = self.link.talk_seconds(SYNC_PART * step.parameter_bytes, step.batch_bytes)
        return step.seconds / (step.seconds + talk)

    @property
    def rounds(self) -> float:
        """In mode rounds, once rounds have grown to their full length."""
        return self._rounds(self.round_steps * self.step.batch_bytes)

    @property
    def rounds_without_batches(self) -> float:
        """The same if no batches are sent."""
        return self._rounds(0)

    def _rounds(self, batches_bytes: int) -> float:
        computing = self.round_steps * self.step.seconds
        talk = self.link.talk_seconds(ROUND_BYTES_PER_PARAMETER * self.step.parameters, batches_bytes)
        return computing / (computing + talk)

    @property
    def advice(self) -> Literal["sync", "rounds"]:
        """The mode that learns more in the same time on this link."""
        return "rounds" if self.rounds > ROUNDS_SAMPLES * self.sync else "sync"

    @property
    def best(self) -> float:
        """The share in the mode that is advised."""
        return self.rounds if self.advice == ROUNDS else self.sync

    def sentence(self, mode: str) -> str:
        """What a user must know whose run is in this mode."""
        link, sync, length = self.link, self._said(self.sync), self.round_steps
        rounds = self._said(self.rounds)
        if self.rounds_without_batches - self.rounds > BATCHES_COUNT:
            rounds += f" ({_percent(self.rounds_without_batches)} with --data local, which sends no batches)"
        if mode == ROUNDS:
            text = f"at {link}, this run uses {rounds} of this machine once rounds have {length} steps"
            if self.advice == "sync":
                text += f"; --mode sync would use {sync}, and needs fewer samples"
            return text
        if self.advice == "sync":
            text = f"at {link}, sync would use {sync} of this machine"
            return f"{text}: use --mode sync, which needs fewer samples"
        text = f"at {link}, sync would use {sync} of this machine, rounds of {length} {rounds}"
        if link.bound != "at least":
            return f"{text}: use --mode rounds"
        # The probe was too short to say how fast the link is: by its delay alone, sync may be as good.
        by_delay = self.step.seconds / (self.step.seconds + link.talk_seconds(0, 0))
        if self.rounds <= ROUNDS_SAMPLES * by_delay:
            return f"{text}: try --mode sync first, and --mode rounds if nodes wait"
        return f"{text}: use --mode rounds, unless the link is far faster than that"

    def _said(self, share: float) -> str:
        return f"{self.link.bound} {_percent(share)}"

    def numbers(self) -> dict[str, Any]:
        """All of it for programs."""
        step, link = self.step, self.link
        return {
            "down_bytes_per_second": round(link.down.bytes_per_second),
            "down_bound": link.down.bound,
            "up_bytes_per_second": round(link.up.bytes_per_second),
            "up_bound": link.up.bound,
            "round_trip_seconds": round(link.round_trip_seconds, 6),
            "step_seconds": round(step.seconds, 6),
            "parameters": step.parameters,
            "parameter_bytes": step.parameter_bytes,
            "samples": step.samples,
            "batch_bytes": step.batch_bytes,
            "round_steps": self.round_steps,
            "share_sync": round(self.sync, 4),
            "share_rounds": round(self.rounds, 4),
            "share_rounds_without_batches": round(self.rounds_without_batches, 4),
            "advice": self.advice,
        }


def _percent(share: float) -> str:
    """A share in whole percents, never as none or all of it."""
    return f"{min(max(round(100 * share), 1), 99)} %"
