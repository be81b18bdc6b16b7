"""Codes 650 to 652: the page of a run."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

PAGE = [
    Explanation(
        "W5-650",
        "the page cannot listen at that address",
        "another program has the port, or --host is no address of this machine.",
        "leave out --port: then any free one is taken. To look from another machine, the safest way is"
        " a tunnel by ssh to the usual port.",
        "w5xde show latest\nssh -L 8050:127.0.0.1:8050 the-machine",
    ),
    Explanation(
        "W5-651",
        "too many runs to compare",
        "with more than eight curves in one chart, no two of them can be told apart.",
        "name at most eight runs.",
        "w5xde show monday tuesday wednesday",
    ),
    Explanation(
        "W5-652",
        "the report cannot be written",
        "its folder does not exist, or is read-only, or the disk is full.",
        "name a file in a folder that you can write.",
        "w5xde show latest --html run.html",
    ),
]
