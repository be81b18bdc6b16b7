"""The words of the commands that an engine minds, from the settings that `w5xde train` was given.

Only arguments become words: variables, `w5xde.toml` and the job are read by the commands themselves, which
run in the same folder. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from w5xde.setting_sources import ENVIRONMENT_PREFIX, NO_SETTINGS
from w5xde.specs.command_settings import CLUSTER_SETTINGS, COMMAND_SETTINGS
from w5xde.specs.setting_help import default_of, setting_type

# Settings that the engine itself gives to each command.
_GIVEN = {"nodes", "resume", "name", "runs", "json", "ticket_file", "host", "port", "advertise"}
# And those of nodes that are decided for all of them.
_ALIKE = {"nodes", "node_name", "accept_code", "wait", "json", "log"}


def serve_words(arguments: Mapping[str, Any]) -> list[str]:
    """The flags of `w5xde serve` among the arguments of `w5xde train`; host, port and addresses if given."""
    entrance = {"host": "0.0.0.0", "port": 0}
    given = {key: value for key, value in arguments.items() if value is not None}
    words = _flags("serve", given, set(COMMAND_SETTINGS["serve"]) - _GIVEN)
    return [*words, *_flags("serve", entrance | given, {"host", "port", "advertise"})]


def join_words(arguments: Mapping[str, Any]) -> list[str]:
    """The flags of `w5xde join` among the arguments of `w5xde train`."""
    return _flags("join", arguments, set(COMMAND_SETTINGS["join"]) - _ALIKE)


def _flags(command: str, values: Mapping[str, Any], wanted: Iterable[str]) -> list[str]:
    chosen = {key: values[key] for key in sorted(wanted) if values.get(key) is not None}
    return [word for key, value in chosen.items() for word in _flag(command, key, value)]


def _flag(command: str, setting: str, value: Any) -> list[str]:
    dashed = setting.replace("_", "-")
    if value is True:
        return [f"--{dashed}"]
    if value is False:
        is_optional = setting_type(setting) == bool | None or default_of(command, setting) is True
        return [f"--no-{dashed}"] if is_optional else []
    return [f"--{dashed}={value}"]


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the user that commands on other hosts need: settings, and where modules are."""
    ours = {f"{ENVIRONMENT_PREFIX}{setting.upper()}" for setting in {*CLUSTER_SETTINGS, *_GIVEN}}
    return {
        key: value
        for key, value in environment.items()
        if (key.startswith(ENVIRONMENT_PREFIX) and key not in ours | NO_SETTINGS) or key == "PYTHONPATH"
    }
