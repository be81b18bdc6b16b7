"""A ticket as a QR code in the terminal, for machines with a camera. Needs the extra `qr`."""

from __future__ import annotations

# Light around the code, in modules: the standard asks for four; phones read two, and terminals are small.
_QUIET = 2
# Two modules above one another in one character. Terminals are dark more often than not: light is drawn.
_BLOCKS = {(True, True): " ", (True, False): "▄", (False, True): "▀", (False, False): "█"}


def qr_lines(text: str) -> list[str] | None:
    """The code, line by line; None if the package that makes it is not installed."""
    try:
        import segno
    except ImportError:
        return None
    # Capitals: only those have the mode that takes 5.5 bits for each character rather than 8.
    code = segno.make_qr(text.upper(), mode="alphanumeric", error="l")
    rows = [[bool(module) for module in row] for row in code.matrix_iter(border=_QUIET)]
    if len(rows) % 2:
        rows.append([False] * len(rows[0]))
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return ["".join(_BLOCKS[pair] for pair in zip(above, below, strict=True)) for above, below in pairs]
