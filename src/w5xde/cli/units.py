"""Numbers, bytes and durations as people read them. Knows no terminal."""

from __future__ import annotations


def count_text(number: int) -> str:
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)


def number_text(number: int, word: str) -> str:
    """So many of something: `1 node`, `2 nodes`, `3 batches`."""
    if number == 1:
        return f"1 {word}"
    return f"{number:,} {word}es" if word.endswith("tch") else f"{number:,} {word}s"


def bytes_text(number: float) -> str:
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def duration_text(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
