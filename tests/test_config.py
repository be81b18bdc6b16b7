"""Settings: flags win over variables, these over the file, that over defaults; errors name the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from msgspec import Meta

import w5xde
from tests.processes import run_python
from w5xde.config import Settings, field_types
from w5xde.errors import UsageError
from w5xde.setting_sources import SettingSources, resolve
from w5xde.specs.command_settings import COMMAND_DEFAULTS, COMMAND_SETTINGS

COMMANDS = list(COMMAND_SETTINGS)


def resolved(
    arguments: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    file: str | None = None,
    *,
    command: str = "train",
    folder: Path | None = None,
) -> Settings:
    if file is not None and folder is not None:
        (folder / "w5xde.toml").write_text(file, encoding="utf-8")
    return resolve(command, arguments or {}, environment=environment, folder=folder)


def refused(*layers: Any, **keywords: Any) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(*layers, **keywords)
    assert caught.value.exit_code == 2
    return "\n".join(caught.value.lines())


# --- precedence-----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [5, None], ids=["flag", "no flag"])
@pytest.mark.parametrize("variable", ["6", None], ids=["variable", "no variable"])
@pytest.mark.parametrize("file", ["7", None], ids=["file", "no file"])
def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path, flag, variable, file):
    settings = resolved(
        {"batch_size": flag},
        {} if variable is None else {"W5XDE_BATCH_SIZE": variable},
        None if file is None else f"batch-size = {file}",
        folder=tmp_path,
    )
    assert settings.batch_samples == int(flag or variable or file or 32)


def test_each_setting_is_decided_on_its_own(tmp_path):
    settings = resolved({"seed": 1}, {"W5XDE_STEPS": "2"}, "epochs = 3\nsteps = 9\nseed = 9", folder=tmp_path)
    assert (settings.seed, settings.steps, settings.epochs, settings.batch_samples) == (1, 2, 3, 32)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_defaults_of_its_own_that_anybody_may_override(command, tmp_path):
    for key, value in COMMAND_DEFAULTS.get(command, {}).items():
        assert key in COMMAND_SETTINGS[command]
        assert getattr(resolved(command=command), key) == value
        assert getattr(resolved(file=f"{key} = 9", command=command, folder=tmp_path), key) == 9
        assert getattr(resolved({key: 8}, command=command, folder=tmp_path), key) == 8


def test_every_setting_can_be_given_through_every_door(tmp_path):
    values: dict[str, Any] = {
        "mode": "rounds",
        "batch_size": 3,
        "batches_per_step": 4,
        "scale_for_batch": False,
        "staleness": 5,
        "delay_correction": False,
        "local_steps": "12",
        "round_rate": 1.25,
        "clip_norm": 0.5,
        "max_update_norm": "off",
        "verify": 0.0,
        "canary": False,
        "robust": "off",
        "precision": "bf16",
        "seed": 6,
        "shuffle": False,
        "drop_last": True,
        "steps": 7,
        "epochs": 8,
        "seconds": 1.5,
        "evaluate_every": 9,
        "evaluate": "skip",
        "plateau_metric": "loss",
        "data": "local",
        "cache_bytes": 1000,
        "loader_workers": 2,
        "compress": "up: bf16 | zstd:1, down: lz4",
        "recording": "off",
        "engine": "ray",
        "nodes": 10,
        "cpus_per_node": 2.5,
        "gpus_per_node": 1.0,
        "labels": "ray.io/market-type=spot",
        "host": "0.0.0.0",
        "port": 4444,
        "advertise": "trainer.example.org",
        "ship": "helper.py,layers",
        "ticket_file": "ticket",
        "ticket_lifetime": "7d",
        "ticket_uses": "any",
        "insecure": True,
        "new_identity": True,
        "tls_cert": "cert.pem",
        "tls_key": "key.pem",
        "tls_ca": "ca.pem",
        "road": "tcp",
        "socket_buffer": 1048576,
        "tcp_nodelay": False,
        "tcp_keepalive": False,
        "tcp_quickack": True,
        "devices": "cpu,cuda:0",
        "threads": 2,
        "node_name": "apple",
        "with_parent": True,
        "accept_code": "9b" * 32,
        "wait": "2.5m",
        "identity": "keys",
        "known_ticket": "@ticket",
        "checkpoint_every": "7steps",
        "keep_checkpoints": 11,
        "durability": "step",
        "skip_bad_batches": True,
        "name": "orchard",
        "runs": "elsewhere",
        "log": "verbose",
        "json": True,
        "page": True,
    }
    assert {*values, "resume", "override"} == set(Settings.__struct_fields__)
    for command, names in COMMAND_SETTINGS.items():
        # These need a run to go on with.
        wanted = [name for name in names if name not in ("resume", "override")]
        mine = {key: values[key] for key in wanted}
        text = {f"W5XDE_{key.upper()}": str(value) for key, value in mine.items()}
        toml = "\n".join(
            f"{key.replace('_', '-')} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for key, value in mine.items()
        )
        by_flag = resolved({key: str(value) for key, value in mine.items()}, command=command)
        by_variable = resolved({}, text, command=command)
        by_file = resolved(file=toml, command=command, folder=tmp_path)
        assert {key: getattr(by_flag, key) for key in wanted} == mine
        assert by_flag == by_variable == by_file


def test_variables_of_others_and_settings_of_other_commands_are_left_alone(tmp_path):
    settings = resolved(
        {}, {"PATH": "/bin", "W5XDE_STEPS": "3"}, "epochs = 4", command="join", folder=tmp_path
    )
    assert settings.steps is None
    assert settings.epochs is None


def test_underscores_in_the_file_are_as_good_as_dashes(tmp_path):
    assert resolved(file="batch_size = 9", folder=tmp_path).batch_size == 9


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_a_variable_says_yes_and_no_in_the_usual_words(text, value):
    assert resolved({}, {"W5XDE_SHUFFLE": text}).shuffle is value


def test_no_file_no_variables_and_no_flags_give_the_defaults(tmp_path):
    assert resolved(folder=tmp_path) == Settings()


# --- unknown --------------------------------------------------------------------------------------


def test_an_unknown_argument_names_the_nearest_known_one():
    assert "unknown setting 'batchsize'. Did you mean 'batch-size'?" in refused({"batchsize": 3})


def test_python_is_told_names_as_python_writes_them():
    with pytest.raises(UsageError, match=r"unknown setting 'batchsize'. Did you mean 'batch_size'\?"):
        resolve("train", {"batchsize": 3}, in_python=True)
    with pytest.raises(UsageError, match=r"batch_size True must be a whole number") as caught:
        resolve("train", {"batch_size": True}, in_python=True)
    assert caught.value.fix == "help(w5xde.train) lists every setting"
    with pytest.raises(UsageError, match=r"tls_cert and tls_key go together"):
        resolve("train", {"tls_cert": "a-tls-key.pem"}, in_python=True)
    with pytest.raises(UsageError, match=r"batch-size 'many' must be a whole number \(in the environment\)"):
        resolve("train", {}, environment={"W5XDE_BATCH_SIZE": "many"}, in_python=True)


def test_the_python_interface_is_told_names_as_python_writes_them():
    with pytest.raises(UsageError, match="Did you mean 'batch_size'"):
        w5xde.train("train.py", batchsize=5)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="batch_size True must be"):
        w5xde.train("train.py", batch_size=True)


def test_an_unknown_variable_names_the_nearest_known_one():
    error = refused({}, {"W5XDE_BATCHSIZE": "3"})
    assert "unknown setting W5XDE_BATCHSIZE in the environment" in error
    assert "Did you mean 'batch-size'?" in error


@pytest.mark.parametrize("key", ["batchsize", "batch-sise", "batch_sizes"])
def test_an_unknown_key_of_the_file_names_the_nearest_known_one(tmp_path, key):
    assert f"unknown setting '{key}' in w5xde.toml. Did you mean 'batch-size'?" in (
        refused(file=f"{key} = 3", folder=tmp_path)
    )


def test_a_key_like_none_that_is_known_points_to_the_help(tmp_path):
    error = refused(file="zzzzzz = 3", folder=tmp_path)
    assert "Did you mean" not in error
    assert "--help" in error


def test_an_unknown_key_is_an_error_for_every_command(tmp_path):
    (tmp_path / "w5xde.toml").write_text("batchsize = 3", encoding="utf-8")
    for command in COMMANDS:
        assert "Did you mean" in refused(command=command, folder=tmp_path)


# --- nonsense -------------------------------------------------------------------------------------

NONSENSE: dict[str, list[Any]] = {
    "mode": ["both"],
    "batch_size": [0, -1, "many", 1.5, "1.5"],
    "batches_per_step": [0, -1, 65537, "x"],
    "staleness": [-1, "x"],
    "clip_norm": [0, -1.0, "inf", "nan", "x"],
    "max_update_norm": [0, -1.0, "inf", "nan", "x"],
    "robust": ["trim", "trim:0", "trim:-1", "trim:500", "trim:x", "mean", ""],
    "precision": ["fp64"],
    "seed": [-1, 2**63, "x"],
    "shuffle": ["perhaps"],
    "drop_last": ["perhaps"],
    "steps": [0, -1, "x"],
    "epochs": [0, -5, "x"],
    "seconds": [0, -1, "x", "nan"],
    "evaluate_every": [0, "x"],
    "evaluate": ["hold", ""],
    "override": ["", "lr", "lr=", "lr=-1", "lr=0", "lr=inf", "lr=nan", "wd=1", "lr=x", "lr=1;2", "lr=0.1"],
    "data": ["remote"],
    "cache_bytes": [-1, 2**60, "1GiB"],
    "loader_workers": [-1, 65],
    "compress": ["", "gzip", "zstd:99", "lz4 | bf16", "int8", "down: int8", "side: lz4", "lz4, zstd"],
    "nodes": [-1, 1001],
    "port": [-1, 65536, "http"],
    "threads": [0, 1025],
    "name": ["", "../runs", "a b", "-x", "x" * 65, "[red]", "a/b", "run\n"],
    "log": ["loud"],
    "json": ["perhaps"],
}
CASES = [(key, value) for key, values in NONSENSE.items() for value in values]


@pytest.mark.parametrize(("key", "value"), CASES, ids=[f"{key}={value!r}" for key, value in CASES])
def test_a_bad_value_is_told_with_the_settings_name(key, value):
    first_line = refused({key: value}).splitlines()[0]
    assert key.replace("_", "-") in first_line
    assert "$" not in first_line


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("road", "nonsense", "road 'nonsense' must be auto, shared, unix or tcp"),
        ("mode", "both", "mode 'both' must be sync, async or rounds"),
        ("log", "loud", "log 'loud' must be silent, normal or verbose"),
        ("staleness", "-1", "staleness -1 must be 0 or more"),
        ("staleness", "x", "staleness 'x' must be a whole number"),
        ("cache_bytes", "1GB", "cache-bytes '1GB' must be a whole number"),
        ("nodes", "many", "nodes 'many' must be a whole number, a range like 2..16, or auto"),
        ("nodes", -1, "nodes -1 must be from 0 to 1000 or auto"),
        ("batches_per_step", "two", "batches-per-step 'two' must be a whole number"),
        ("batch_size", 1.5, "batch-size 1.5 must be a whole number"),
        ("port", "70000", "port 70000 must be from 0 to 65535"),
        ("seconds", "0", "seconds 0 must be more than 0"),
        ("clip_norm", "x", "clip-norm 'x' must be a number"),
        ("shuffle", "perhaps", "shuffle 'perhaps' must be true or false"),
        ("max_update_norm", [1], "max-update-norm [1] must be a number or text"),
        ("host", "", "host '' must be longer"),
        ("runs", 3, "runs 3 must be text"),
    ],
)
def test_a_bad_value_is_told_with_what_it_must_be(key, value, told):
    assert refused({key: value}).splitlines()[0].endswith(told)


@pytest.mark.parametrize("more", [{}, {"mode": "async"}, {"robust": "median"}, {"compress": "up: int8"}])
def test_a_step_that_adapts_is_refused_with_what_to_use_instead(more):
    told = refused({"batches_per_step": "auto", **more})
    assert "batches-per-step auto does not exist" in told
    assert "as many as nodes compute at a time" in told


def test_rates_are_scaled_in_sync_mode_alone():
    assert "use mode sync, or set the rate" in refused({"scale_for_batch": True, "mode": "async"})
    assert resolved({"scale_for_batch": True}).scale_for_batch


def test_a_robust_mean_needs_steps_that_several_nodes_can_share():
    assert "use mode sync, or robust off" in refused({"robust": "trim:2", "mode": "async"})
    assert "make it 5 or more" in refused({"robust": "trim:2", "batches_per_step": 4})
    assert "make it 3 or more" in refused({"robust": "median", "batches_per_step": 2})
    assert resolved({"robust": "trim:2", "batches_per_step": 5}).robust_rule is not None


@pytest.mark.parametrize("name", ["../x", "a b", "node\n"])
def test_a_bad_name_for_a_node_is_told(name):
    assert "name" in refused({"node_name": name}, command="join").splitlines()[0]


@pytest.mark.parametrize("value", ["", "9b1c5d0c1f5b", "g" * 64, "9b" * 32 + "0", "9b" * 32 + "\n"])
def test_only_a_whole_hash_of_code_can_be_accepted(value):
    told = refused({"accept_code": value}, command="join")
    assert "accept-code" in told
    assert "must be all 64 digits" in told
    assert resolved({"accept_code": "9B" * 32}, command="join").accept_code == "9B" * 32


def test_a_hash_of_code_that_is_too_short_is_answered_with_where_to_find_it():
    told = refused({"accept_code": "7f44e4"}, command="join")
    assert "fix: copy the whole sha256 that  w5xde join TICKET  shows" in told


def test_a_bad_value_is_answered_with_the_help_of_its_own_command():
    assert "fix: w5xde join --help-all lists every setting" in refused({"cache_bytes": -1}, command="join")
    assert "fix: w5xde serve --help-all lists every setting" in refused({"seed": -1}, command="serve")


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ({"tls_cert": "cert.pem"}, "give both, or none"),
        ({"scale_for_batch": True, "mode": "async"}, "use mode sync, or set the rate in the job"),
        ({"override": "lr=0.1"}, "add resume, or set lr in the job"),
        ({"durability": "step", "checkpoint_every": "off"}, "leave out one of the two"),
        ({"round_rate": 2.0}, "leave it out, or use mode rounds"),
        ({"local_steps": 3}, "leave it out, or use mode rounds"),
        ({"robust": "median", "mode": "async"}, "use mode sync, or robust off and verify 0.1"),
        ({"robust": "median", "batches_per_step": 2}, "make it 3 or more"),
        ({"compress": "up: int8", "mode": "rounds"}, "in mode rounds use auto"),
    ],
)
def test_settings_that_contradict_each_other_are_answered_with_what_to_change(flags, fix):
    assert f"fix: {fix}" in refused(flags)


@pytest.mark.parametrize("value", [-1, "-1", "nan", "inf", float("inf"), "soon", "", "1w", "1h30", "٣"])
def test_a_bad_time_to_wait_is_told(value):
    told = refused({"wait": value}, command="join")
    assert f"wait {value} must be seconds (0 or more), or like 30s, 10m, 1h or forever" in told
    assert "fix: write it like  --wait 10m" in told


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (5, 5),
        (0, 0),
        (2.5, 2.5),
        ("90", 90),
        ("0", 0),
        ("30s", 30),
        ("1.5m", 90),
        ("1h", 3600),
        ("2 D", 172800),
    ],
)
def test_a_time_to_wait_is_seconds_or_has_a_unit(value, seconds):
    assert resolved({"wait": value}, command="join").wait_seconds == seconds


def test_a_node_may_wait_for_ever():
    assert resolved({"wait": "forever"}, command="join").wait_seconds == float("inf")
    assert resolved(command="join").wait_seconds == 5.0


@pytest.mark.parametrize(
    ("text", "every"),
    [("30s", (30, None)), ("1.5m", (90, None)), ("2h", (7200, None)), ("1d", (86400, None)),
     ("500steps", (None, 500)), ("off", (None, None))],
)  # fmt: skip
def test_checkpoints_are_written_by_time_or_by_steps(text, every):
    settings = resolved({"checkpoint_every": text})
    assert (settings.save_seconds, settings.save_steps) == every


@pytest.mark.parametrize("text", ["", "30", "0s", "0steps", "1.5steps", "-1s", "s", "soon", "٣s"])
def test_a_bad_time_between_checkpoints_is_told(text):
    assert "must be like 30s, 5m, 500steps or off" in refused({"checkpoint_every": text})


def test_a_bad_value_says_where_it_came_from(tmp_path):
    told = "batch-size 'many' must be a whole number (in {})"
    assert told.format("the environment") in refused({}, {"W5XDE_BATCH_SIZE": "many"})
    assert told.format("w5xde.toml") in refused(file='batch-size = "many"', folder=tmp_path)


def test_a_bad_value_in_the_file_is_told_even_if_a_flag_would_hide_it(tmp_path):
    told = refused({"batch_size": 3}, file="batch-size = 0", folder=tmp_path)
    assert "batch-size 0 must be 1 or more (in w5xde.toml)" in told


@pytest.mark.parametrize(
    "text", ["batch-size = ", "= 3", "batch-size = 3\nbatch-size = 4", "[train]\nsteps = 3"]
)
def test_a_file_that_is_not_a_list_of_settings_is_told(tmp_path, text):
    assert "w5xde.toml" in refused(file=text, folder=tmp_path)


def test_a_file_that_is_not_text_is_told(tmp_path):
    (tmp_path / "w5xde.toml").write_bytes(b"\xff\xfe")
    assert "w5xde.toml cannot be read" in refused(folder=tmp_path)


# --- the schema -----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", Settings.__struct_fields__)
def test_every_setting_has_a_description(setting):
    annotated = field_types()[setting]
    assert get_origin(annotated) is Annotated
    [text] = [extra.description for extra in get_args(annotated) if isinstance(extra, Meta)]
    assert text
    assert text[0] == text[0].lower(), "descriptions follow a flag, so they begin in lower case"
    assert not text.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_of_every_command_is_in_the_schema_once(command):
    wanted = COMMAND_SETTINGS[command]
    assert set(wanted) <= set(Settings.__struct_fields__)
    assert len(wanted) == len(set(wanted))


def test_every_setting_belongs_to_a_command():
    assert {key for wanted in COMMAND_SETTINGS.values() for key in wanted} == set(Settings.__struct_fields__)


def test_a_step_has_two_batches_in_sync_mode_and_one_in_async_unless_told():
    assert Settings().step_batches == 2
    assert Settings(robust="median").step_batches == 3
    assert Settings(robust="trim:4").step_batches == 9
    assert Settings(mode="async").step_batches == 1
    assert Settings(mode="async", batches_per_step=3).step_batches == 3


@pytest.mark.parametrize(
    ("kept", "batches"), [({"batches_per_step": None}, 8), ({}, 8), ({"batches_per_step": 4}, 4)]
)
def test_a_resumed_run_keeps_the_number_of_batches_in_a_step_that_it_was_begun_with(tmp_path, kept, batches):
    """Earlier versions wrote null for a number that was not given, and 8 was their default."""
    (tmp_path / "old").mkdir()
    manifest = {"settings": {"mode": "sync", **kept}}
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    again = {"resume": "old", "runs": str(tmp_path)}
    assert resolved(again).step_batches == batches
    other = 12 - batches
    message = f"batches-per-step is {batches} in run old, not {other}"
    assert message in refused({**again, "batches_per_step": other})


def test_a_resumed_run_keeps_its_device_by_the_name_that_earlier_versions_gave_it(tmp_path):
    (tmp_path / "old").mkdir()
    manifest = {"settings": {"mode": "sync", "device": "cpu", "nodes": 2}}
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    again = resolved({"resume": "old", "runs": str(tmp_path)})
    assert (again.devices, again.nodes) == ("cpu", 2)


def test_training_ends_after_ten_epochs_unless_something_else_says_when():
    assert Settings().epoch_limit == 10
    assert Settings(epochs=3, steps=5).epoch_limit == 3
    assert Settings(steps=5).epoch_limit is None
    assert Settings(seconds=5.0).epoch_limit is None


def test_settings_are_checked_without_loading_torch():
    code = (
        "import sys; from w5xde.setting_sources import resolve; resolve('train', {}); "
        "print('torch' in sys.modules)"
    )
    assert run_python("-c", code).stdout.strip() == "False"


# --- the job's own settings -----------------------------------------------------------------------


def sources(tmp_path: Path, **layers: Any) -> SettingSources:
    if "file" in layers:
        (tmp_path / "w5xde.toml").write_text(layers["file"], encoding="utf-8")
    found = SettingSources("train", layers.get("flags", {}), layers.get("variables", {}), tmp_path)
    return found.with_job(layers.get("job", {}))


@pytest.mark.parametrize(
    ("layers", "value", "origin"),
    [
        ({}, None, "default"),
        ({"job": {"batch_size": 8}}, 8, "the job"),
        ({"job": {"batch_size": 8}, "file": "batch-size = 7"}, 7, "w5xde.toml"),
        ({"job": {"batch_size": 8}, "variables": {"W5XDE_BATCH_SIZE": "6"}}, 6, "W5XDE_BATCH_SIZE"),
        ({"job": {"batch_size": 8}, "flags": {"batch_size": 5}}, 5, "given"),
    ],
)
def test_the_settings_of_a_job_are_its_defaults_and_everything_else_beats_them(
    tmp_path, layers, value, origin
):
    found = sources(tmp_path, **layers)
    assert found.resolve().batch_size == value
    assert found.origins()["batch_size"] == origin


def test_a_setting_of_the_job_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"unknown setting 'batchsize' in the job. Did you mean"):
        sources(tmp_path, job={"batchsize": 8}).resolve()


def test_a_wrong_value_in_the_job_is_told_with_its_source(tmp_path):
    with pytest.raises(UsageError, match=r"batch_size 0 must be 1 or more \(in the job\)"):
        sources(tmp_path, job={"batch_size": 0}).resolve()


def test_dashes_in_the_settings_of_a_job_are_as_good_as_underscores(tmp_path):
    found = sources(tmp_path, job={"clip-norm": 0.5})
    assert found.resolve().clip_norm == 0.5
    assert found.origins()["clip_norm"] == "the job"
    with pytest.raises(UsageError, match=r"unknown setting 'clip_nor' in the job. Did you mean 'clip_norm'"):
        sources(tmp_path, job={"clip-nor": 0.5}).resolve()


def test_settings_of_a_job_that_the_command_does_not_have_are_left_alone():
    found = SettingSources("join", {}).with_job({"batch_size": 8})
    assert "batch_size" not in found.origins()
    assert found.resolve() == SettingSources("join", {}).resolve()
