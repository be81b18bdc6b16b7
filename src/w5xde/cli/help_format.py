"""The form of help: flags beside their texts, examples beside their comments, none wider than the terminal.

Knows no commands.
"""

from __future__ import annotations

import argparse
import re
import textwrap

# A command and its comment, with a wide gap between them.
_EXAMPLE = re.compile(r"(  \S.*?)\s{2,}(\S.*)")
# Where texts begin at the latest.
_COLUMN_MAX = 26
_COMMENT_COLUMN_MAX = 50
# A comment that has less room than this is not wrapped any further.
_COMMENT_WIDTH_MIN = 20


class HelpFormat(argparse.HelpFormatter):
    """Wraps between words alone, because flags have hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_COLUMN_MAX)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        found = [(line, _EXAMPLE.fullmatch(line)) for line in text.splitlines()]
        longest = max((len(match[1]) for _, match in found if match is not None), default=0)
        column = min(longest + 2, _COMMENT_COLUMN_MAX)
        lines: list[str] = []
        for line, match in found:
            if match is None:
                lines += _wrap(line, width)
            else:
                lines += _beside(match[1], match[2], column, width)
        return "\n".join(lines)


def _wrap(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    wrapped = textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
    return wrapped or [""]


def _beside(command: str, comment: str, column: int, width: int) -> list[str]:
    """A command, and its comment beside it in as many lines as that takes."""
    comments = textwrap.wrap(comment, max(_COMMENT_WIDTH_MIN, width - column), break_on_hyphens=False)
    first, *others = comments
    return [f"{command:<{column}}{first}", *(" " * column + other for other in others)]
