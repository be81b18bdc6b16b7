"""The sources of settings: arguments, `W5XDE_*` variables, `w5xde.toml`, the job, and an earlier run.

Knows no torch, so that `--help` is instant, and not which values make sense: `config.py` does.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import inspect

from w5xde.config import Settings, field_types
from w5xde.errors import UsageError
from w5xde.runs import AUTO, CACHE_VARIABLE, MANIFEST, STATE_VARIABLE, find_run, read_manifest
from w5xde.specs.command_settings import COMMAND_DEFAULTS, COMMAND_SETTINGS, FOR_ONCE, OF_THE_PROCESS
from w5xde.specs.engine_settings import LOCAL, is_range
from w5xde.specs.round_settings import ROUNDS
from w5xde.specs.setting_error import SettingError
from w5xde.ticket import VARIABLE

SETTINGS_FILE = "w5xde.toml"
ENVIRONMENT_PREFIX = "W5XDE_"
# Variables of ours that are no settings: they must not reach a manifest.
NO_SETTINGS = {VARIABLE, STATE_VARIABLE, CACHE_VARIABLE}
# Settings that a resumed run must keep: they decide the trained weights.
FIXED_SETTINGS = [
    "mode",
    "batch_samples",
    "step_batches",
    "scale_for_batch",
    "round_lengths",
    "round_rate",
    "clip_norm",
    "precision",
    "plateau_metric",
    "seed",
    "shuffles",
    "drops_last",
    "threads",
]
# The names of sources in messages; what was typed needs none there.
_JOB, _VARIABLES, _TYPED = "the job", "the environment", "given"
_SHOWN = {
    "step_batches": "batches_per_step",
    "round_lengths": "local_steps",
    "batch_samples": "batch_size",
    "shuffles": "shuffle",
    "drops_last": "drop_last",
}
# The default of sync mode when manifests had null for a number of batches in a step that was not given.
_EARLIER_STEP_BATCHES = 8
# Names of settings with a dash, as flags and w5xde.toml write them.
_DASHED = re.compile(
    rf"(?<![\w-])({'|'.join(name.replace('_', '-') for name in field_types() if '_' in name)})(?![\w-])"
)
_SCHEMA = {name: inspect.type_info(kind) for name, kind in field_types().items()}


@dataclass(frozen=True)
class SettingSources:
    """Where the settings of a command come from, in order: the first source that has a setting decides it."""

    command: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    # The job's own settings: its defaults.
    job: Mapping[str, Any] = field(default_factory=dict)
    # Whether the arguments are those of a Python function, in which names have underscores.
    in_python: bool = False

    def with_job(self, settings: Mapping[str, Any]) -> SettingSources:
        """The same sources, and a job's own settings; as in the file, dashes are as good as underscores."""
        return replace(self, job={str(key).replace("-", "_"): value for key, value in settings.items()})

    def resolve(self) -> Settings:
        """The settings of the command: arguments, `W5XDE_*`, `w5xde.toml`, the job, then defaults.

        Those of a run that goes on are its own, changed by what was given now.
        """
        settings = self._merged()
        if settings.resume is None or "resume" not in COMMAND_SETTINGS[self.command]:
            return settings
        if settings.resume != AUTO:
            return _resumed(settings, find_run(settings.runs, settings.resume), self._given)
        folder = _folder_of_same(settings)
        if not (folder / MANIFEST).exists():
            return settings
        # Nobody types this command, so all that it says counts as given. It may be on another host now, where
        # the default port, or the port of before, is taken.
        return _resumed(settings, folder.absolute(), {"port": 0} | self._said)

    @property
    def is_same_again(self) -> bool:
        """Whether the command may be a repetition of itself: `resume auto`."""
        return self._merged().resume == AUTO

    def _merged(self) -> Settings:
        """What the sources say, without an earlier run."""
        merged = dict(COMMAND_DEFAULTS.get(self.command, {}))
        for origin, layer in self._layers():
            if layer:
                self._check({**merged, **layer}, origin)
                merged.update(layer)
        return _as_in_run(_convert(merged, "", self._all_settings))

    def _check(self, values: dict[str, Any], origin: str) -> None:
        """Refuse values that make no sense; the error has names as the source of the values writes them."""
        try:
            _convert(values, origin, self._all_settings)
        except UsageError as error:
            if origin != _JOB and (origin or not self.in_python):
                raise
            named = _python_names(error.what)
            raise UsageError(named, code=error.code, why=error.why, fix=error.fix) from None

    @property
    def _all_settings(self) -> str:
        """Where a user finds every setting of the command."""
        if self.in_python:
            return f"help(w5xde.{'Pool' if self.command == 'pool' else self.command}) lists every setting"
        return f"w5xde {self.command} --help-all lists every setting"

    def origins(self) -> dict[str, str]:
        """For each setting of the command the source of its value; of a resumed run the run, if it is one."""
        found = dict.fromkeys(COMMAND_SETTINGS[self.command], "default")
        settings, layers = self.resolve(), self._layers()
        if settings.goes_on:
            found.update(dict.fromkeys(set(found) - set(FOR_ONCE), f"run {settings.resume}"))
            layers = layers[1:] if self.is_same_again else layers[-1:]
        for origin, layer in layers:
            found.update({key: _variable(key) if origin == _VARIABLES else origin or _TYPED for key in layer})
        return found

    @property
    def _given(self) -> dict[str, Any]:
        return {key: value for key, value in self.arguments.items() if value is not None}

    @property
    def _said(self) -> dict[str, Any]:
        """What all sources but the job say."""
        return {key: value for _, layer in self._layers()[1:] for key, value in layer.items()}

    def _layers(self) -> list[tuple[str, dict[str, Any]]]:
        """Each source with the settings of this command that it has; the strongest source is the last."""
        known = list(Settings.__struct_fields__)
        for key in self.arguments:
            _require_known(key, known, "unknown setting {!r}", in_python=self.in_python)
        for key in self.job:
            _require_known(key, known, "unknown setting {!r} in the job", in_python=True)
        others = [
            (_JOB, dict(self.job)),
            (SETTINGS_FILE, _read_file(self.folder, known)),
            (_VARIABLES, _read_environment(self.environment, known)),
        ]
        wanted = set(COMMAND_SETTINGS[self.command])
        for _, layer in others:
            if "engine" not in wanted and is_range(layer.get("nodes")):
                # A file or a variable may say how many nodes a cluster has; this command starts none there.
                del layer["nodes"]
        return [
            *((origin, {key: layer[key] for key in layer if key in wanted}) for origin, layer in others),
            ("", self._given),
        ]


def resolve(
    command: str,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    in_python: bool = False,
) -> Settings:
    """The settings of a command without a job."""
    return SettingSources(command, arguments, environment or {}, folder, in_python=in_python).resolve()


def _as_in_run(settings: Settings) -> Settings:
    """Replace `local-steps @RUN` by the lengths that the rounds of that run have."""
    said = str(settings.local_steps)
    if not said.startswith("@"):
        return settings
    folder = find_run(settings.runs, said[1:])
    lengths = read_manifest(folder).get("round_lengths")
    if not isinstance(lengths, str):
        raise UsageError(
            f"run {folder.name} has no rounds, so local-steps {said} says nothing",
            code="W5-210",
            fix="name a run with --mode rounds, or use grow, auto or a number",
        )
    return msgspec.structs.replace(settings, local_steps=lengths)


def _folder_of_same(settings: Settings) -> Path:
    """The folder of the run that `resume auto` begins or continues; refuses what would act at each start."""
    if settings.name in (None, AUTO):
        raise UsageError(
            "resume auto needs the name of the run that it begins or goes on with",
            code="W5-245",
            fix="add --name, for example  --name tuesday --resume auto",
        )
    for key in ("override", "new_identity"):
        if getattr(settings, key):
            raise UsageError(
                f"resume auto is for a command that is started again and again, and {key.replace('_', '-')}"
                " would act at each start",
                code="W5-246",
                fix=f"use it once, with  --resume {settings.name} , and leave it out of the command",
            )
    return Path(settings.runs) / str(settings.name)


def _resumed(settings: Settings, folder: Path, given: dict[str, Any]) -> Settings:
    """The settings of an earlier run, changed by those given now; refuses to change FIXED_SETTINGS."""
    earlier = read_manifest(folder)["settings"]
    if given.get("name", folder.name) != folder.name:
        raise UsageError(
            "a run that is resumed keeps its name", code="W5-211", fix="leave out --name, or --resume"
        )
    lasting = set(Settings.__struct_fields__) - set(FOR_ONCE)
    known = {key: value for key, value in earlier.items() if key in lasting}
    if "device" in earlier:
        # As earlier versions called it.
        known.setdefault("devices", earlier["device"])
    if known.get("batches_per_step") is None and known.get("mode", "sync") == "sync":
        known["batches_per_step"] = _EARLIER_STEP_BATCHES
    own = {key: getattr(settings, key) for key in OF_THE_PROCESS}
    if settings.engine != LOCAL:
        # The coordinator of such a run starts no nodes itself, and that is all its manifest can say.
        own["nodes"] = settings.nodes
    place = {"resume": folder.name, "name": folder.name, "runs": str(folder.parent)}
    whole = _as_in_run(_convert({**known, **own, **given, **place}, folder.name))
    before = _as_in_run(_convert(known, folder.name))
    fixed = [(key, getattr(before, key), getattr(whole, key)) for key in FIXED_SETTINGS]
    if whole.mode == ROUNDS:
        # What is rounded there decides the weights.
        fixed += [("compress", before.directions, whole.directions)]
    for key, was, now in fixed:
        if was != now:
            raise UsageError(
                f"{_SHOWN.get(key, key).replace('_', '-')} is {was} in run {folder.name}, not {now}",
                code="W5-211",
                fix="leave that setting out, or start a new run without --resume",
            )
    return whole


def _convert(values: dict[str, Any], origin: str, advice: str = "start a new run") -> Settings:
    """The settings of these values; `advice` is the fix for an error that has none of its own."""
    if values.get("batches_per_step") == "auto":
        raise UsageError(
            "batches-per-step auto does not exist: give a number",
            code="W5-210",
            why="a step that follows the gradient noise was measured to reach a loss later than a fixed one",
            fix="as many as nodes compute at a time, more over slow links; a run says how many are useful",
        )
    nodes = values.get("nodes")
    if isinstance(nodes, str) and nodes.removeprefix("-").isdecimal():
        # As flags and variables have it.
        values = values | {"nodes": int(nodes)}
    if isinstance(values.get("local_steps"), bool):
        # As earlier versions wrote it.
        values = values | {"local_steps": "on" if values["local_steps"] else "off"}
    try:
        # Not strict: flags and variables are text, and TOML may have 5 for a float.
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        text = _sentence(str(error), values)
        where = f" (in {origin})" if origin else ""
        fix = error.__cause__.fix if isinstance(error.__cause__, SettingError) else advice
        raise UsageError(f"{text}{where}", code="W5-210", fix=fix) from None


def _sentence(error: str, values: Mapping[str, Any]) -> str:
    """Translate an error of msgspec: which setting has which value, and what it must be."""
    found = re.fullmatch(r"(.*) - at `\$\.(\w+)`", error, re.DOTALL)
    if found is None:
        return error  # a sentence of the schema's own
    what, setting = found.groups()
    kinds = [kind for kind in _kinds(setting) if not isinstance(kind, inspect.NoneType)]
    name, value = setting.replace("_", "-"), values[setting]
    if what.startswith("Expected") and ", got" not in what:
        # Of the right kind, and out of bounds: shown as it was typed.
        words = [kind.values for kind in kinds if isinstance(kind, inspect.LiteralType)]
        bounded = next(kind for kind in kinds if not isinstance(kind, inspect.LiteralType))
        allowed = _either([_bounds_text(bounded), *(str(each) for group in words for each in group)])
        return f"{name} {value if value != '' else repr(value)} must be {allowed}"
    return (
        f"{name} {value!r} must be {_either([each for kind in kinds for each in _kind_names(setting, kind)])}"
    )


def _kinds(setting: str) -> tuple[inspect.Type, ...]:
    """The types of the schema that a setting may have."""
    kind = _SCHEMA[setting]
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _kind_names(setting: str, kind: inspect.Type) -> Sequence[str]:
    match kind:
        case inspect.LiteralType():
            # In the order in which the schema names them; msgspec sorts them.
            named = get_args(field_types()[setting])[0]
            choices = (named,) if get_origin(named) is Literal else get_args(named)
            return [word for each in choices if get_origin(each) is Literal for word in get_args(each)]
        case inspect.BoolType():
            return ["true", "false"]
        case inspect.IntType():
            return ["a whole number"]
        case inspect.FloatType():
            return ["a number"]
    return ["text"]


def _bounds_text(kind: inspect.Type) -> str:
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return "longer"
    if kind.gt is not None:
        return f"more than {kind.gt:g}"
    return f"{kind.ge} or more" if kind.le is None else f"from {kind.ge} to {kind.le}"


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _python_names(sentence: str) -> str:
    """A sentence with the names of settings as Python writes them."""
    return _DASHED.sub(lambda found: found[0].replace("-", "_"), sentence)


def _require_known(key: str, known: list[str], sentence: str, *, in_python: bool = False) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f". Did you mean {near[0] if in_python else near[0].replace('_', '-')!r}?" if near else ""
    listed = "help(w5xde.train)" if in_python else "w5xde train --help-all"
    fix = "" if near else f"{listed} lists every setting"
    raise UsageError(sentence.format(key) + hint, code="W5-210", fix=fix)


def _variable(key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{key.upper()}"


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
