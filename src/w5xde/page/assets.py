"""The files of the page: which there are, their types, and their bytes. Knows no HTTP."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
# In the order in which they are loaded: each uses what those before it define.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "static/dom.js",
    "static/points.js",
    "static/charts.js",
    "static/nodes.js",
    "static/pool.js",
    "static/lanes.js",
    "static/run.js",
    "static/compare.js",
    "static/stream.js",
    "static/app.js",
)
STYLES = ("vendor/uPlot.min.css", "static/page.css")
INDEX = "static/index.html"
ICON = "static/icon.svg"

_TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "svg": "image/svg+xml",
}
# What a browser may ask for, by path.
SERVED = {"/": INDEX, "/icon.svg": ICON} | {f"/{name}": name for name in (*SCRIPTS, *STYLES)}


@cache
def content(name: str) -> bytes:
    """The bytes of a file."""
    return (FOLDER / name).read_bytes()


def media_type(name: str) -> str:
    return _TYPES[name.rpartition(".")[2]]
