"""Every error that can be raised is explained, every explanation is of one that can, and each is provoked."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

import w5xde
from tests.processes import run_python
from w5xde.bench.command import build_parser as build_bench_parser
from w5xde.cli.main import main
from w5xde.cli.parser import build_parser
from w5xde.deploy.command import parse as parse_deploy
from w5xde.errors import JoinError, UsageError, W5xdeError
from w5xde.explanations import EXPLANATIONS, code_of, document

PACKAGE = Path(w5xde.__file__).parent
TESTS = Path(__file__).parent
# In these errors are looked up, or made to be shown.
MADE_BY_HAND = {"test_explanations.py", "test_sanitize.py"}
CODE = re.compile(r"W5-\d{3}")


def strings(path: Path) -> list[tuple[int, str]]:
    """The string constants of a file with their lines, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {
        id(node.value) for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }  # fmt: skip
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]


def raised() -> set[str]:
    return {
        text
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "explanations"
        for _, text in strings(path)
        if CODE.fullmatch(text)
    }


def test_every_code_that_is_raised_is_explained_and_no_other() -> None:
    assert raised() == set(EXPLANATIONS)
    assert list(EXPLANATIONS) == sorted(EXPLANATIONS)


def test_every_code_is_provoked_by_a_test_that_looks_at_it() -> None:
    provoked: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        looks_at_codes = re.search(r"\.code\b|error\[", path.read_text(encoding="utf-8"))
        if path.name in MADE_BY_HAND or not looks_at_codes:
            continue
        provoked |= {code for _, text in strings(path) for code in CODE.findall(text)}
    assert set(EXPLANATIONS) - provoked == set()


@pytest.mark.parametrize("code", EXPLANATIONS)
def test_an_explanation_says_what_why_what_to_do_and_shows_it(code: str) -> None:
    each = EXPLANATIONS[code]
    assert each.code == code
    assert not each.title.endswith(".")
    assert "\n" not in each.title + each.why + each.fix
    assert each.why.endswith(".")
    assert each.fix.endswith(".")
    assert each.example.strip() == each.example != ""


@pytest.mark.parametrize("code", EXPLANATIONS)
def test_the_commands_in_an_example_can_be_typed(code: str) -> None:
    for line in EXPLANATIONS[code].example.splitlines():
        words = shlex.split(line) if line.startswith("w5xde ") else []
        if "--help" in words or "--version" in words:
            continue
        if words[1:2] == ["bench"]:
            build_bench_parser().parse_args(words[2:])
        elif words[1:2] == ["deploy"]:
            parse_deploy(words[2:])
        elif words:
            build_parser().parse_args(words[1:])


@pytest.mark.parametrize("written", ["W5-103", "w5-103", "103", "W5103", " error[W5-103]: "])
def test_a_code_may_be_written_as_it_comes(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(written) == "W5-103"
    assert main(["explain", written]) == 0
    told = capsys.readouterr().out
    assert told.startswith("W5-103: nothing answers at that address\n  why: ")
    assert "\n  fix: " in told
    assert "\n  example:\n    w5xde serve" in told


def test_all_codes_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{each.code}  {each.title}" for each in EXPLANATIONS.values()]


def test_a_program_may_ask_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "407", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found.keys() == {"code", "title", "why", "fix", "example"}
    assert found["code"] == "W5-407"
    assert main(["explain", "--json"]) == 0
    assert [each["code"] for each in json.loads(capfd.readouterr().out)["errors"]] == list(EXPLANATIONS)


@pytest.mark.parametrize(
    ("unknown", "words"), [("W5-1033", "W5-103 (nothing answers"), ("x", "lists all codes")]
)
def test_an_unknown_code_is_told_with_those_near_it(
    unknown: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", unknown]) == UsageError.exit_code
    told = capsys.readouterr().err
    assert f"there is no error {unknown}" in told
    assert words in told


def test_an_error_in_the_settings_does_not_keep_it_from_being_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "w5xde.toml").write_text("batchsize = 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("W5XDE_NONSENSE", "1")
    assert main(["audit", "latest"]) == UsageError.exit_code
    assert main(["explain", "210"]) == 0


def test_an_explanation_is_instant_because_torch_is_not_imported() -> None:
    program = "import sys\nfrom w5xde.cli.main import main\nmain(['explain', '103', '--json'])\n"
    program += "sys.exit('torch' in sys.modules)"
    assert run_python("-c", program).returncode == 0


def test_an_error_says_where_there_is_more_if_there_is() -> None:
    error = JoinError("nothing answers at x:1", code="W5-103", why="it is off", fix="start it")
    assert error.lines() == [
        "error[W5-103]: nothing answers at x:1",
        "  why: it is off",
        "  fix: start it",
        "  more: w5xde explain W5-103",
    ]
    assert W5xdeError("oh", code="W5-999").lines() == ["error[W5-999]: oh"]


def test_the_document_is_what_the_explanations_say() -> None:
    written = (TESTS.parent / "docs" / "errors.md").read_text(encoding="utf-8")
    assert written == document(), "write it anew with  make docs"
