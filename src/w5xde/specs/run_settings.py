"""The settings of the life of a run: when it is evaluated, saved and resumed, and as whom."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from w5xde.specs.durations import parse_duration
from w5xde.specs.setting_error import SettingError


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the model is evaluated, and what is kept of the run."""

    evaluate_every: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="steps between evaluations (default: once an epoch and at the end)"),
    ] = None
    evaluate: Annotated[
        Literal["wait", "skip"],
        Meta(
            description="an evaluation that is due while another one is under way. wait: training waits until"
            " it can begin; skip: leave it out, and say so"
        ),
    ] = "wait"
    plateau_metric: Annotated[
        str | None,
        Meta(
            description="the metric that steps ReduceLROnPlateau (default: the only one, or loss); training"
            " waits for it"
        ),
    ] = None
    checkpoint_every: Annotated[
        str, Meta(description="how often a checkpoint is written: 30s, 5m, 500steps or off")
    ] = "30s"
    keep_checkpoints: Annotated[int, Meta(ge=3, description="how many checkpoints are kept")] = 3
    durability: Annotated[
        Literal["checkpoint", "step"],
        Meta(description="step: every step is on disk before it counts, so that no step is ever redone"),
    ] = "checkpoint"
    skip_bad_batches: Annotated[
        bool, Meta(description="call an epoch complete without batches that fail on every node")
    ] = False
    page: Annotated[
        bool, Meta(description="show the run in a browser: start a page beside it, and print its address")
    ] = False
    resume: Annotated[
        str | None,
        Meta(
            description="continue this run (its name, its folder, or latest). auto, with a name: begin that"
            " run, or go on with it, or end at once if it is complete"
        ),
    ] = None
    override: Annotated[
        str | None,
        Meta(description="change the learning rate of a run that is resumed: lr=0.001, or lr=x0.1 (a tenth)"),
    ] = None
    name: Annotated[str | None, Meta(description="name of the run (default: a new one)")] = None
    runs: Annotated[str, Meta(description="folder in which runs are kept")] = "runs"
    identity: Annotated[
        str | None,
        Meta(
            description="folder with the key by which nodes know this coordinator (made there if there is"
            " none), so that a restart on another machine is the same coordinator; always encrypted"
        ),
    ] = None
    known_ticket: Annotated[
        str | None,
        Meta(
            description="@FILE with a ticket that  w5xde ticket new --offline  made for that identity: it is"
            " valid from the start, and no other is printed"
        ),
    ] = None
    ticket_lifetime: Annotated[
        str, Meta(description="how long nodes may join by the ticket of this start: 24h, 7d or never")
    ] = "24h"
    ticket_uses: Annotated[
        int | str, Meta(description="how many nodes may join by the ticket of this start: a number, or any")
    ] = 100


def require_known_ticket(known_ticket: str | None, identity: str | None) -> None:
    """Refuse the text of a ticket, which is a secret, and a ticket for no identity."""
    if known_ticket is not None and not known_ticket.startswith("@"):
        # Without the value.
        raise SettingError(
            "known-ticket must name the file that holds the ticket, as @FILE: others could read it here",
            fix="write the ticket to a file with  w5xde ticket new --offline --out FILE",
        )
    if known_ticket is not None and identity is None:
        raise SettingError(
            "a known-ticket was made for an identity", fix="name its folder too: --identity DIR"
        )


def parse_lifetime(text: str) -> float | None:
    """The seconds of `24h`, `90m`, `7d` or `30` (seconds); None for `never`."""
    if text.strip().lower() == "never":
        return None
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if seconds < 1:
        raise SettingError(f"{text!r} is not a lifetime", fix="write it like 24h, 90m, 7d or never")
    return seconds


def parse_uses(value: int | str) -> int | None:
    """How many nodes may join with a ticket; None for `any`."""
    text = str(value).strip().lower()
    if text == "any":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise SettingError(f"{value!r} is not a number of uses", fix="write a number, or any")
    return int(text)
