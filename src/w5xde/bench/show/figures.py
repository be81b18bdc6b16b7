"""Formats figures with their units. An unknown figure is a dash."""

from __future__ import annotations

from collections.abc import Callable, Iterable

UNKNOWN = "–"


def count(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:,.0f}"


def rate(number: float | None) -> str:
    """A rate; small ones with decimals."""
    if number is None:
        return UNKNOWN
    return f"{number:,.0f}" if number >= 100 else f"{number:,.1f}" if number >= 10 else f"{number:,.2f}"


def size(number: float | None) -> str:
    if number is None:
        return UNKNOWN
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(number) >= unit:
            return f"{number / unit:,.2f} {name}" if unit == 10**9 else f"{number / unit:,.1f} {name}"
    return f"{number:,.0f} B"


def speed(number: float | None) -> str:
    return UNKNOWN if number is None else f"{size(number)}/s"


def seconds(number: float | None) -> str:
    if number is None:
        return UNKNOWN
    if number >= 1:
        return f"{number:,.2f} s"
    return f"{number * 1e3:,.1f} ms" if number >= 1e-3 else f"{number * 1e6:,.0f} µs"


def micros(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:,.0f} µs"


def ratio(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.3f}" if number < 10 else f"{number:,.1f}"


def times(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.2f}×"


def percent(number: float | None) -> str:
    return UNKNOWN if number is None else f"{100 * number:.1f} %"


def loss(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.4f}"


def least_and_most(
    numbers: Iterable[float | None], shown: Callable[[float | None], str], *, spread: bool = False
) -> str:
    known = [number for number in numbers if number is not None]
    if not known:
        return UNKNOWN
    if min(known) == max(known):
        return shown(known[0])
    text = f"{shown(min(known))} – {shown(max(known))}"
    return f"{text}, spread {shown(max(known) - min(known))}" if spread else text
