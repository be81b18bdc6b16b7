"""The four sources of settings: arguments, `W5XDE_*` variables, `w5xde.toml`, and an earlier run.

Knows no torch, so that `--help` is instant, and not which values make sense: `config.py` does.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from w5xde.config import COMMAND_DEFAULTS, COMMAND_SETTINGS, FOR_ONCE, Settings
from w5xde.errors import UsageError
from w5xde.runs import STATE_VARIABLE, find_run, read_manifest
from w5xde.ticket import VARIABLE

SETTINGS_FILE = "w5xde.toml"
ENVIRONMENT_PREFIX = "W5XDE_"
# Variables of ours that are no settings: they must not reach a manifest.
NO_SETTINGS = {VARIABLE, STATE_VARIABLE}
# Settings that a resumed run must keep: they decide the trained weights.
FIXED_SETTINGS = [
    "mode",
    "batch_size",
    "step_batches",
    "clip_norm",
    "precision",
    "seed",
    "shuffle",
    "threads",
]
_SHOWN = {"step_batches": "batches_per_step"}


def resolve(
    command: str,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """The settings of a command: arguments, then `W5XDE_*`, then `w5xde.toml`, then defaults."""
    known = list(Settings.__struct_fields__)
    for key in arguments:
        _require_known(key, known, "unknown setting {!r}")
    merged = dict(COMMAND_DEFAULTS.get(command, {}))
    wanted = set(COMMAND_SETTINGS[command])
    layers = [
        ("w5xde.toml", _read_file(folder, known)),
        ("the environment", _read_environment(environment or {}, known)),
        ("", {key: value for key, value in arguments.items() if value is not None}),
    ]
    for origin, layer in layers:
        relevant = {key: value for key, value in layer.items() if key in wanted or not origin}
        if relevant:
            _convert({**merged, **relevant}, origin)
            merged.update(relevant)
    settings = _convert(merged, "")
    if settings.resume is None or "resume" not in wanted:
        return settings
    return _resumed(settings, {key: value for key, value in arguments.items() if value is not None})


def _resumed(settings: Settings, given: dict[str, Any]) -> Settings:
    """The settings of an earlier run, changed by those given now; refuses to change FIXED_SETTINGS."""
    folder = find_run(settings.runs, settings.resume or "")
    earlier = read_manifest(folder)["settings"]
    if given.get("name", folder.name) != folder.name:
        raise UsageError(
            "a run that is resumed keeps its name", code="W5-211", fix="leave out --name, or --resume"
        )
    lasting = set(Settings.__struct_fields__) - set(FOR_ONCE)
    known = {key: value for key, value in earlier.items() if key in lasting}
    place = {"resume": folder.name, "name": folder.name, "runs": str(folder.parent)}
    whole = _convert({**known, **given, **place}, folder.name)
    before = _convert(known, folder.name)
    for key in FIXED_SETTINGS:
        was, now = getattr(before, key), getattr(whole, key)
        if was != now:
            raise UsageError(
                f"{_SHOWN.get(key, key).replace('_', '-')} is {was} in run {folder.name}, not {now}",
                code="W5-211",
                fix="leave that setting out, or start a new run without --resume",
            )
    return whole


def _convert(values: dict[str, Any], origin: str) -> Settings:
    try:
        # Not strict: flags and variables are text, and TOML may have 5 for a float.
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        text = re.sub(r" - at `\$\.(\w+)`", lambda m: f" for {m[1].replace('_', '-')}", str(error))
        where = f" in {origin}" if origin else ""
        raise UsageError(
            f"{text}{where}", code="W5-210", fix="w5xde train --help lists every setting"
        ) from None


def _require_known(key: str, known: list[str], sentence: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f". Did you mean {near[0].replace('_', '-')!r}?" if near else ""
    fix = "" if near else "w5xde train --help lists every setting"
    raise UsageError(sentence.format(key) + hint, code="W5-210", fix=fix)


def _read_environment(environment: Mapping[str, str], known: list[str]) -> dict[str, Any]:
    layer = {}
    for variable, value in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in NO_SETTINGS:
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            _require_known(key, known, f"unknown setting {variable} in the environment ({{!r}})")
            layer[key] = value
    return layer


def _read_file(folder: Path | None, known: list[str]) -> dict[str, Any]:
    if folder is None or not (path := folder / SETTINGS_FILE).is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{SETTINGS_FILE} cannot be read: {error}", code="W5-210") from None
    layer = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        _require_known(name, known, f"unknown setting {key!r} in {SETTINGS_FILE}")
        layer[name] = value
    return layer
