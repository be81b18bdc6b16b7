"""Choice: which codec brings a payload over a link soonest, by what was measured of both.

    seconds = calling it + bytes x (encoding + decoding one) + bytes x ratio / link

Knows no codecs, links or clock: callers measure, and pass `now`.
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
# How long a measurement of the codecs is believed: gradients change as a model learns, and so do idle cores.
MEASURED_SECONDS = 10.0
# But not more often than this, whatever the link does: on a busy machine it seems to change all the time.
SOONEST_SECONDS = 2.0
# A link so many times faster or slower than when codecs were measured is another situation.
ANOTHER_LINK = 2.0
# A codec must promise to be sooner than raw by this share, for what the model of the cost leaves out.
GAIN_MIN = 0.03
# And sooner than the codec in use by this one, because two measurements of the same differ by about as much.
SWITCH_GAIN_MIN = 0.1
# How fast an estimate follows a change: the weight of the newest measurement, and if it is quite another.
_NEWEST = 0.3
_NEWEST_IF_ANOTHER = 0.7


@dataclass(slots=True)
class CodecCost:
    """What a codec costs: for each call, for each byte, and what it leaves to be sent."""

    call_seconds: float
    byte_seconds: float
    ratio: float

    def seconds(self, raw_bytes: int, link_bytes_per_second: float) -> float:
        return self.call_seconds + raw_bytes * (self.byte_seconds + self.ratio / link_bytes_per_second)

    @classmethod
    def fitted(cls, samples: dict[int, tuple[float, float]]) -> CodecCost:
        """From seconds and ratios by size: a line through the smallest and the largest payload."""
        least, most = min(samples), max(samples)
        seconds, ratio = samples[most]
        byte_seconds = seconds / most
        if least < most:
            # Never below nothing: noise may make the small payload take longer than the large one.
            byte_seconds = max(0.0, (seconds - samples[least][0]) / (most - least))
        return cls(max(0.0, seconds - byte_seconds * most), byte_seconds, ratio)


class CodecChoice:
    """For one direction to one peer: what was measured, and what follows from it."""

    def __init__(self) -> None:
        self.link_bytes_per_second: float | None = None
        self.reason = f"{NONE}: the link has not been measured"
        # Seconds and ratio by size of payload, since measuring began; and the costs that follow.
        self._samples: dict[str, dict[int, tuple[float, float]]] = {}
        self._costs = {NONE: CodecCost(0.0, 0.0, 1.0)}
        self._spec = NONE
        self._measured_at: float | None = None
        self._measured_link = 0.0
        # The last answer holds until something else is measured, or another size is asked for.
        self._answered_bytes: int | None = None

    def link(self, bytes_per_second: float) -> None:
        """The link was seen to carry so much."""
        if not bytes_per_second > 0:
            return
        known = self.link_bytes_per_second
        if known is None:
            self.link_bytes_per_second = bytes_per_second
        else:
            is_another = not known / ANOTHER_LINK < bytes_per_second < known * ANOTHER_LINK
            weight = _NEWEST_IF_ANOTHER if is_another else _NEWEST
            self.link_bytes_per_second = known + weight * (bytes_per_second - known)
        self._answered_bytes = None

    def is_due(self, now: float) -> bool:
        """Whether the codecs should be measured (again)."""
        link = self.link_bytes_per_second
        if link is None:
            return False
        if self._measured_at is None or now - self._measured_at >= MEASURED_SECONDS:
            return True
        if now - self._measured_at < SOONEST_SECONDS:
            return False
        return not self._measured_link / ANOTHER_LINK <= link <= self._measured_link * ANOTHER_LINK

    def measuring_begun(self, now: float) -> None:
        """Codecs are being measured: what follows takes the place of what was known."""
        self._measured_at = now
        self._measured_link = self.link_bytes_per_second or 0.0
        self._samples.clear()

    def measured(
        self, spec: str, raw_bytes: int, encoded_bytes: int, encode_seconds: float, decode_seconds: float
    ) -> None:
        """A codec was tried on a payload. Two sizes of payload tell what a call costs beside its bytes."""
        samples = self._samples.setdefault(spec, {})
        samples[raw_bytes] = (encode_seconds + decode_seconds, encoded_bytes / raw_bytes)
        self._costs[spec] = CodecCost.fitted(samples)
        self._answered_bytes = None

    def pick(self, raw_bytes: int) -> str:
        """The codec for a payload of this size."""
        if raw_bytes != self._answered_bytes:
            self._spec = self._choose(raw_bytes)
            self._answered_bytes = raw_bytes
        return self._spec

    def _choose(self, raw_bytes: int) -> str:
        link = self.link_bytes_per_second
        if link is None:
            return NONE
        seconds = {spec: cost.seconds(raw_bytes, link) for spec, cost in self._costs.items()}
        raw_seconds = seconds.pop(NONE)
        at = f"at {_shown_bytes(link)}/s"
        best = min(seconds, key=seconds.__getitem__, default=NONE)
        mine = seconds.get(self._spec)
        # Whoever is in use stays while it gains anything and nobody gains clearly more: noise moves nothing.
        if mine is not None and mine < raw_seconds and seconds[best] > mine * (1 - SWITCH_GAIN_MIN):
            best = self._spec
        elif best == NONE or seconds[best] > raw_seconds * (1 - GAIN_MIN):
            soonest = f", {best} {_shown_seconds(seconds[best])}" if seconds else ""
            self.reason = f"{NONE}: {_shown_seconds(raw_seconds)}{soonest} {at}"
            return NONE
        taken = _shown_seconds(seconds[best])
        self.reason = f"{best}: {taken} instead of {_shown_seconds(raw_seconds)} {at}"
        return best


def _shown_seconds(seconds: float) -> str:
    for unit in ("s", "ms"):
        if seconds >= 1:
            return f"{_shown(seconds)} {unit}"
        seconds *= 1000
    return f"{_shown(seconds)} µs"


def _shown_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{_shown(count)} {unit}"
        count /= 1000
    return f"{_shown(count)} GB"


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
