"""Values as YAML writes them. Every JSON string is a YAML string, so nothing else needs to be quoted.

Knows no Kubernetes. YAML is only written, never read: a parser of it is no dependency.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence


def quoted(text: str) -> str:
    """A string in double quotes."""
    written = json.dumps(text, ensure_ascii=False)
    # YAML takes some of the other characters, such as U+2028, for the end of a line.
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in written)


def listed(words: Sequence[str], indent: int) -> str:
    """A list of strings, one on each line."""
    return ("\n" + " " * indent).join(f"- {quoted(word)}" for word in words)


def block(text: str, indent: int) -> str:
    """A text of several lines, readable if YAML can hold it so; else in quotes."""
    is_plain = text.endswith("\n") and not text.endswith("\n\n") and not text.startswith((" ", "\n"))
    if not is_plain or not all(each == "\n" or each.isprintable() for each in text):
        return quoted(text)
    # Also lines of blanks alone are indented: YAML would take theirs away.
    return "|\n" + textwrap.indent(text, " " * indent, lambda line: line != "\n").removesuffix("\n")
