"""Help: the settings that people use, in groups; all of them if asked; and Python's help has them too."""

from __future__ import annotations

import pydoc
import re

import pytest

import w5xde
from w5xde.cli.main import main
from w5xde.config import Settings
from w5xde.specs.command_settings import COMMAND_SETTINGS, COMMON, GROUPS
from w5xde.specs.setting_help import describe_settings

LONG = ["train", "serve", "join"]
# A pool is no command.
COMMANDS = COMMAND_SETTINGS.keys() - {"pool"}


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags(text: str) -> set[str]:
    return {flag.removeprefix("--") for flag in re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)}


def flag_of(setting: str) -> str:
    return {"node_name": "name", "known_ticket": "ticket"}.get(setting) or setting.replace("_", "-")


@pytest.mark.parametrize("command", LONG)
def test_help_shows_what_most_people_use_in_groups(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, "--help", capsys=capsys)
    expected = {flag_of(each) for each in COMMAND_SETTINGS[command] if each in COMMON}
    assert flags(text) - {"help-all", "print-config"} == expected
    assert len(expected) <= 15
    titles = [title for title in GROUPS if f"\n{title}:\n" in text]
    assert len(titles) >= 2


@pytest.mark.parametrize("command", LONG)
def test_help_all_shows_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(command, "--help-all", capsys=capsys)
    assert flags(text) - {"help-all", "print-config"} == {flag_of(each) for each in COMMAND_SETTINGS[command]}


@pytest.mark.parametrize("command", sorted(COMMANDS - {*LONG, "ticket"}))
def test_a_command_with_few_settings_shows_all_at_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, "--help", capsys=capsys)
    assert flags(text) >= {flag_of(each) for each in COMMAND_SETTINGS[command]}
    assert "--help-all" not in text


def test_every_setting_is_in_one_group() -> None:
    grouped = [setting for group in GROUPS.values() for setting in group]
    assert sorted(grouped) == sorted(Settings.__struct_fields__)
    assert set(grouped) >= COMMON


@pytest.mark.parametrize("words", [["--help"], *([command, "--help"] for command in sorted(COMMANDS))])
def test_help_fits_into_eighty_columns(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(*words, capsys=capsys)
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_the_effective_batch_is_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of("train", "--help", capsys=capsys).split())
    assert "batch-size × batches-per-step" in text
    assert "32 × 2 = 64" in text


def test_an_old_spelling_still_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--device " not in help_of("train", "--help-all", capsys=capsys)
    assert main(["train", "nowhere.py", "--device", "cpu", "--nodes", "auto"]) == 20
    assert "nowhere.py" in capsys.readouterr().err


@pytest.mark.parametrize("command", LONG)
def test_pythons_help_lists_every_setting_with_its_type_and_default(command: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(w5xde, command)))
    for setting in COMMAND_SETTINGS[command]:
        assert re.search(rf"^ *{setting}: .+ = .+$", text, re.MULTILINE), setting
    assert "batch_size: int | None = None" in describe_settings("train")
    assert "mode: 'sync' | 'async' | 'rounds' = 'sync'" in describe_settings("train")
    assert "nodes: int | str = 0" in describe_settings("serve")
