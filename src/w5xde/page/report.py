"""The page of a run as one file, which opens from disk and asks for nothing.

The same scripts as those of the live page, with the data beside them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from w5xde.follow.run_follower import RunFollower
from w5xde.page import picture
from w5xde.page.assets import ICON, INDEX, SCRIPTS, STYLES, content
from w5xde.sanitize import to_json

# In the page's own file: where its styles and scripts are named.
_STYLES_AT, _SCRIPTS_AT, _ICON_AT = "<!-- styles -->", "<!-- scripts -->", "icon.svg"


def report(folders: Sequence[Path], clock: float) -> bytes:
    """The report about runs: the first, and what the others are compared with."""
    runs = [RunFollower(folder) for folder in folders]
    for run in runs:
        run.poll()
    others = [
        {"about": picture.about(run), "history": picture.history(run), "now": picture.now(run, clock)}
        for run in runs
    ]
    data = {"runs": [run.name for run in runs], "others": others, "run": picture.whole(runs[0], clock)}
    # A script ends at the first </script>, also inside of a string.
    text = to_json(data).replace("<", "\\u003c")
    script = "\n".join(content(name).decode() for name in SCRIPTS)
    style = "\n".join(content(name).decode() for name in STYLES)
    csp = f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}"
    icon = f"data:image/svg+xml;base64,{base64.b64encode(content(ICON)).decode()}"
    before, styles, rest = content(INDEX).decode().partition(_STYLES_AT)
    between, _, after = rest.partition(_SCRIPTS_AT)
    # The links to the files of a live page stand between a mark and the end of its block.
    head = f'<meta http-equiv="Content-Security-Policy" content="{csp}">\n<style>{style}</style>'
    if not styles:
        raise ValueError(f"{INDEX} has no place for styles")
    body = f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>'
    page = before + head + _without_links(between) + body + _without_links(after)
    return page.replace(f"/{_ICON_AT}", icon).encode()


def _without_links(text: str) -> str:
    """The page without the lines that name its styles and scripts."""
    kept = [line for line in text.split("\n") if 'href="/static' not in line and 'href="/vendor' not in line]
    return "\n".join(line for line in kept if "<script src=" not in line)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
