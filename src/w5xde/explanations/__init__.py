"""What each error code means: `w5xde explain` prints it, and docs/errors.md lists it.

    1xx  joining and the protocol         2xx  the command, its settings and the job
    3xx  computing                        4xx  the run folder, and private files
    5xx  the identity of the other side   6xx  clusters, and the page
    7xx  bugs in w5xde

Knows nothing of how errors are raised: a test compares the codes here with those in the source.
"""

from __future__ import annotations

import difflib
import re

from w5xde.explanations.data import DATA
from w5xde.explanations.deploying import DEPLOYING
from w5xde.explanations.engines import ENGINES
from w5xde.explanations.evaluating import EVALUATING
from w5xde.explanations.explanation import Explanation
from w5xde.explanations.frameworks import FRAMEWORKS
from w5xde.explanations.job import JOB
from w5xde.explanations.joining import JOINING
from w5xde.explanations.page import PAGE
from w5xde.explanations.pool import POOL
from w5xde.explanations.running import RUNNING
from w5xde.explanations.sent_code import SENT_CODE
from w5xde.explanations.tickets import TICKETS

EXPLANATIONS: dict[str, Explanation] = {
    each.code: each
    for each in sorted(
        [
            *JOINING,
            *TICKETS,
            *JOB,
            *DATA,
            *EVALUATING,
            *POOL,
            *SENT_CODE,
            *FRAMEWORKS,
            *RUNNING,
            *ENGINES,
            *DEPLOYING,
            *PAGE,
        ],
        key=lambda each: each.code,
    )
}

# What the exit codes of the command mean.
EXIT_CODES = {
    0: "the run is over, or the command did what it should",
    75: "`train`, `serve` or `join` was stopped before the run was over (Ctrl-C, SIGTERM), or another process"
    " has the run for now: try again, with `--name NAME --resume auto` by the same command",
    2: "a mistake on the command line or in a setting: trying again does not help",
    20: "the job cannot be trained as it is written: its file, model, data, loss or optimizer",
    40: "the run folder cannot be used, for example because its `--name` is taken",
    10: "this machine cannot join: the ticket is damaged, no coordinator answers or it refuses, or nobody"
    " agreed to run its code",
    30: "training cannot go on",
    1: "`audit` found a violation, or `doctor` an error",
    70: "an internal error",
    130: "another command was interrupted",
}

# How users may write a code: W5-103, w5-103, w5103, 103, or the whole error[W5-103]:
_WRITTEN = re.compile(r"(?:error\[)?(?:w5-?)?(\d{1,6})(?:\]:?)?", re.IGNORECASE | re.ASCII)
# Suggestions for an unknown code: more would not be read.
NEAR_SHOWN = 4

_FAMILIES = {
    "1": "Joining and the protocol",
    "2": "The command, its settings and the job",
    "3": "Computing",
    "4": "The run folder, and private files",
    "5": "The identity of the other side",
    "6": "Clusters, and the page",
    "7": "Bugs in w5xde",
}


def code_of(written: str) -> str:
    """Return the code that a user wrote, whether it exists or not."""
    found = _WRITTEN.fullmatch(written.strip())
    return f"W5-{found[1]}" if found is not None else written.strip()


def near(code: str) -> list[Explanation]:
    """Return the codes that are most like this one, the likeliest first."""
    found = difflib.get_close_matches(code, EXPLANATIONS, n=NEAR_SHOWN, cutoff=0.6)
    return [EXPLANATIONS[each] for each in found]


def told(explanation: Explanation) -> list[str]:
    """Return the lines of an explanation for a terminal, in the form of the error itself."""
    return [
        f"{explanation.code}: {explanation.title}",
        f"  why: {explanation.why}",
        f"  fix: {explanation.fix}",
        "  example:",
        *(f"    {line}" for line in explanation.example.splitlines()),
    ]


def listed() -> list[str]:
    """Return all codes, one line each."""
    return [f"{each.code}  {each.title}" for each in EXPLANATIONS.values()]


def document() -> str:
    """Return the text of docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Every error has a code, and `w5xde explain CODE` prints what stands here. This file is written by",
        "`make docs` from `src/w5xde/explanations`; edit that.",
        "",
        "## Exit codes",
        "",
        "| exit code | meaning |",
        "|---|---|",
        *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()),
    ]
    family = ""
    for each in EXPLANATIONS.values():
        if each.code[3] != family:
            family = each.code[3]
            lines += ["", f"## {_FAMILIES[family]}"]
        lines += ["", f"### {each.code}: {each.title}", ""]
        lines += [f"**Why:** {each.why}", "", f"**Fix:** {each.fix}", ""]
        lines += ["```", *each.example.splitlines(), "```"]
    return "\n".join(lines) + "\n"
