"""The choice of a codec: which one brings a payload over a link soonest, by measurements of both.

    seconds = cost of a call + bytes x cost of a byte + bytes x ratio / link

Knows no codecs, links or clock: callers measure, and pass `now`.
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
# A measurement is used for this long: gradients change as a model learns, and so does the load of the cores.
MEASURED_SECONDS = 10.0
# But codecs are not measured more often than this: on a busy machine the link seems to change all the time.
SOONEST_SECONDS = 2.0
# Codecs are measured again when the link is this many times faster or slower than at the last measurement.
ANOTHER_LINK = 2.0
# A codec must be faster than no codec by this share, because the formula leaves some costs out.
GAIN_MIN = 0.03
# And faster than the codec in use by this share: two measurements of one codec differ by about as much.
SWITCH_GAIN_MIN = 0.1
# The weight of the newest measurement in an estimate of the link; the second if it differs a lot.
_NEWEST = 0.3
_NEWEST_IF_ANOTHER = 0.7


@dataclass(slots=True)
class CodecCost:
    """The cost of a codec: seconds for a call, seconds for a byte, and the share of bytes that are left."""

    call_seconds: float
    byte_seconds: float
    ratio: float

    def seconds(self, raw_bytes: int, link_bytes_per_second: float) -> float:
        return self.call_seconds + raw_bytes * (self.byte_seconds + self.ratio / link_bytes_per_second)

    @classmethod
    def fitted(cls, samples: dict[int, tuple[float, float]]) -> CodecCost:
        """From (seconds, ratio) by payload size: the line through the smallest and the largest payload."""
        least, most = min(samples), max(samples)
        seconds, ratio = samples[most]
        byte_seconds = seconds / most
        if least < most:
            # Never negative: noise may make the small payload take longer than the large one.
            byte_seconds = max(0.0, (seconds - samples[least][0]) / (most - least))
        return cls(max(0.0, seconds - byte_seconds * most), byte_seconds, ratio)


class CodecChoice:
    """Measurements for one direction to one peer, and the codec that they favour."""

    def __init__(self) -> None:
        self.link_bytes_per_second: float | None = None
        # (Seconds, ratio) by payload size since measuring began, by spec; and the costs computed from them.
        self._samples: dict[str, dict[int, tuple[float, float]]] = {}
        self.costs = {NONE: CodecCost(0.0, 0.0, 1.0)}
        self._spec = NONE
        self._measured_at: float | None = None
        self._measured_link = 0.0
        # The last choice holds until the next measurement, or for another payload size.
        self._answered_bytes: int | None = None

    def link(self, bytes_per_second: float) -> None:
        """Note a measurement of the link."""
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
        """Whether the codecs should be measured now."""
        link = self.link_bytes_per_second
        if link is None:
            return False
        if self._measured_at is None or now - self._measured_at >= MEASURED_SECONDS:
            return True
        if now - self._measured_at < SOONEST_SECONDS:
            return False
        return not self._measured_link / ANOTHER_LINK <= link <= self._measured_link * ANOTHER_LINK

    def measuring_begun(self, now: float) -> None:
        """Begin a new round of measurements, which replaces the last one."""
        self._measured_at = now
        self._measured_link = self.link_bytes_per_second or 0.0
        self._samples.clear()

    def measured(
        self, spec: str, raw_bytes: int, encoded_bytes: int, encode_seconds: float, decode_seconds: float
    ) -> None:
        """Note a trial of a codec. Trials of two sizes separate the cost of a call from that of bytes."""
        samples = self._samples.setdefault(spec, {})
        samples[raw_bytes] = (encode_seconds + decode_seconds, encoded_bytes / raw_bytes)
        self.costs[spec] = CodecCost.fitted(samples)
        self._answered_bytes = None

    def pick(self, raw_bytes: int) -> str:
        """The codec for a payload of this size."""
        if raw_bytes != self._answered_bytes:
            self._spec = self._choose(raw_bytes)
            self._answered_bytes = raw_bytes
        return self._spec

    def reason(self) -> str:
        """Why the last payload was sent with its codec, in a sentence."""
        link, size = self.link_bytes_per_second, self._answered_bytes
        if link is None or size is None:
            return "the link is not measured yet"
        raw_ms = 1000 * self.costs[NONE].seconds(size, link)
        if self._spec == NONE:
            return f"no codec is sooner than {raw_ms:.3g} ms without one"
        mine_ms = 1000 * self.costs[self._spec].seconds(size, link)
        return f"{mine_ms:.3g} ms instead of {raw_ms:.3g} ms"

    def _choose(self, raw_bytes: int) -> str:
        link = self.link_bytes_per_second
        if link is None:
            return NONE
        seconds = {spec: cost.seconds(raw_bytes, link) for spec, cost in self.costs.items()}
        raw_seconds = seconds.pop(NONE)
        if not seconds:
            return NONE
        best = min(seconds, key=seconds.__getitem__)
        mine = seconds.get(self._spec)
        # Keep the codec in use while it gains anything and no other gains clearly more: ignore noise.
        if mine is not None and mine < raw_seconds and seconds[best] > mine * (1 - SWITCH_GAIN_MIN):
            return self._spec
        return best if seconds[best] <= raw_seconds * (1 - GAIN_MIN) else NONE
