"""Consent: nothing of a coordinator's code runs before its user agreed to exactly that code."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from w5xde.cli.consent import ask_in, description, listing
from w5xde.errors import JobError, JoinError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.learn.job.code.origin import JobOrigin
from w5xde.learn.job.job import Job
from w5xde.messages import Layout, Offer, Rules, Welcome
from w5xde.runtime.node.code_request import ReceivedCode
from w5xde.runtime.node.consent import load_if_accepted
from w5xde.ticket import Secret, Ticket

TICKET = Ticket((("10.0.0.1", 5555),), b"f" * 32, bytes(8), Secret(bytes(16)))
HERE = Ticket((("127.0.0.1", 5555),), b"", bytes(8), Secret(bytes(16)), is_clear=True)
CLEAR = replace(HERE, addresses=(("10.0.0.1", 5555),))
JOB = "from w5xde import Job\njob = Job(model=print, data=print, loss=print, optimizer=print)\n"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that the code writes when it runs; modules of the test are forgotten afterwards."""
    monkeypatch.setenv("W5XDE_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path / "ran"
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def received(
    marker: Path, more: str = "", imports: dict[str, str] | None = None, **files: str
) -> ReceivedCode:
    text = f"{more}\nfrom pathlib import Path\nPath({str(marker)!r}).touch()\n{JOB}"
    code = CodeBundle.of(
        "train.py",
        {"train.py": text.encode(), **{f"{name}.py": each.encode() for name, each in files.items()}},
    )
    versions = {"PyYAML": "6.0.1"}
    return ReceivedCode(code, Offer(code.job, code.sizes, code.sha256, imports or {}, versions))


def refused(code: ReceivedCode, ticket: Ticket = TICKET, accept: str | None = None, ask=None) -> JoinError:
    with pytest.raises(JoinError) as caught:
        load_if_accepted(code, ticket, accept, ask)
    assert caught.value.code == "W5-285"
    return caught.value


def test_without_a_terminal_and_without_a_hash_nothing_runs(marker):
    code = received(marker)
    error = refused(code)
    assert f"w5xde join TICKET --accept-code {code.bundle.sha256}" in error.fix
    assert not marker.exists()


def test_a_hash_of_other_code_is_refused_also_if_this_code_was_accepted_before(marker):
    code = received(marker)
    for wrong in ("0" * 64, code.bundle.sha256[:-1] + "x", code.bundle.sha256[:12], ""):
        assert code.bundle.sha256 in refused(code, accept=wrong).what
    assert not marker.exists()
    load_if_accepted(code, TICKET, code.bundle.sha256.upper(), None)
    assert marker.exists()
    refused(code, accept="0" * 64)


def test_who_says_no_is_not_asked_to_run_it_and_nothing_runs(marker):
    refused(received(marker), ask=lambda code, ticket: False)
    assert not marker.exists()


def test_who_agreed_once_is_not_asked_about_the_same_code_of_the_same_coordinator(marker):
    asked: list[str] = []

    def ask(code: ReceivedCode, ticket: Ticket) -> bool:
        asked.append(code.bundle.sha256)
        assert not marker.exists()
        return True

    code = received(marker, imports={"rich": "rich", "left_behind": ""})
    notes: list[str] = []
    named = load_if_accepted(code, TICKET, None, ask, lambda kind, text: notes.append(text))
    assert f"running the coordinator's train.py, sha256 {code.bundle.sha256[:16]}…" in notes[0]
    assert notes[1:] == ["not here: left_behind (not sent)"]
    assert isinstance(named.job, Job)
    assert named.origin.sha256 == code.bundle.sha256
    assert marker.exists()
    load_if_accepted(code, TICKET, None, ask)
    assert len(asked) == 1
    # Other code, and another coordinator.
    marker.unlink()
    load_if_accepted(received(marker, "# changed"), TICKET, None, ask)
    marker.unlink()
    load_if_accepted(code, replace(TICKET, fingerprint=b"g" * 32), None, ask)
    assert len(asked) == 3


def test_code_that_came_in_clear_text_from_elsewhere_needs_its_hash(marker):
    code = received(marker)
    error = refused(code, CLEAR, ask=lambda code, ticket: pytest.fail("asked"))
    assert "clear text" in error.what
    assert "compare that" in error.fix
    assert not marker.exists()
    load_if_accepted(code, CLEAR, code.bundle.sha256, None)
    assert marker.exists()
    marker.unlink()
    load_if_accepted(received(marker, "# here"), HERE, None, lambda code, ticket: True)
    assert marker.exists()


def test_no_compiled_files_are_left_beside_the_code(marker):
    before = sys.dont_write_bytecode
    code = received(marker, "import helper_of_consent", helper_of_consent="x = 1\n")
    load_if_accepted(code, TICKET, code.bundle.sha256, None)
    folder = marker.parent / "state" / "code" / code.bundle.sha256
    assert sorted(path.name for path in folder.rglob("*")) == ["helper_of_consent.py", "train.py"]
    assert sys.dont_write_bytecode == before


def test_a_state_folder_may_have_a_colon_in_its_name(marker, monkeypatch):
    monkeypatch.setenv("W5XDE_STATE", str(marker.parent / "a:b"))
    code = received(marker)
    assert isinstance(load_if_accepted(code, TICKET, code.bundle.sha256, None).job, Job)


@pytest.mark.parametrize("has_link", [False, True], ids=["", "behind a link"])
def test_modules_of_code_that_ran_before_are_not_those_of_this_code(marker, has_link, monkeypatch):
    if has_link:
        (marker.parent / "real").mkdir()
        (marker.parent / "link").symlink_to(marker.parent / "real")
        monkeypatch.setenv("W5XDE_STATE", str(marker.parent / "link" / "state"))
    seen = "import helper_of_consent as h\nfrom pathlib import Path\nPath({!r}).write_text(str(h.x))\n"
    place = marker.parent / "seen"
    for number in (1, 2):
        code = received(marker, seen.format(str(place)), helper_of_consent=f"x = {number}\n")
        load_if_accepted(code, TICKET, code.bundle.sha256, None)
        assert place.read_text() == str(number)


def test_a_module_of_a_name_that_is_in_use_is_refused(marker):
    code = received(marker, pytest="x = 1\n")
    with pytest.raises(JobError, match="a module pytest is in use") as caught:
        load_if_accepted(code, TICKET, code.bundle.sha256, None)
    assert caught.value.code == "W5-288"
    assert not marker.exists()


@pytest.mark.parametrize(
    ("imports", "what", "fix"),
    [
        ({"not_there": "PyYAML"}, "which is not installed here", "install PyYAML 6.0.1 yourself"),
        ({"not_there": ""}, "which the coordinator has and did not send", "--ship not_there.py"),
        ({}, "there is no module not_there.inner", "install what is missing"),
    ],
)
def test_a_module_that_is_missing_is_named_with_what_to_do(marker, imports, what, fix):
    code = received(marker, "import not_there.inner" if not imports else "import not_there", imports)
    with pytest.raises(JobError) as caught:
        load_if_accepted(code, TICKET, code.bundle.sha256, None)
    assert caught.value.code == "W5-288"
    assert what.replace(".inner", "") in caught.value.what.replace(".inner", "")
    assert fix in caught.value.fix


def test_other_errors_of_the_code_are_those_of_any_job(marker):
    code = received(marker, "raise ValueError('oh')")
    with pytest.raises(JobError, match="oh") as caught:
        load_if_accepted(code, TICKET, code.bundle.sha256, None)
    assert caught.value.code == "W5-208"


def test_a_coordinator_with_other_code_by_now_is_left():
    def welcome(code: str) -> Welcome:
        return Welcome("run", 1, "node", Layout([]), Rules("sync", 0, "fp32", 1, "stream"), code=code)

    origin = JobOrigin("a" * 64)
    assert origin.compare(welcome("a" * 64), "cpu") == ""
    for now in ("b" * 64, ""):
        with pytest.raises(JoinError, match="job has changed") as caught:
            origin.compare(welcome(now), "cpu")
        assert caught.value.code == "W5-289"
    # A node with its own copy does not care.
    assert JobOrigin().compare(welcome("b" * 64), "cpu") == ""


# --- what is shown --------------------------------------------------------------------------------


class Terminal:
    """A terminal at which these lines are typed."""

    def __init__(self, *typed: str, is_one: bool = True) -> None:
        self._typed = list(typed)
        self._is_one = is_one
        self.text = ""

    def isatty(self) -> bool:
        return self._is_one

    def readline(self) -> str:
        return self._typed.pop(0) if self._typed else ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing waits."""


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["y\n"], True), (["YES\n"], True), ([" y \n"], True),
        (["\n"], False), (["n\n"], False), ([], False), (["yep\n"], False), (["да\n"], False),
        (["sh\n"], False),
        (["show\n", "y\n"], True), (["s\n", "show\n", "\n"], False), (["show\n"], False),
    ],
)  # fmt: skip
def test_only_a_yes_is_a_yes(marker, typed, runs, capsys):
    terminal = Terminal(*typed)
    ask = ask_in(terminal, terminal)
    assert ask is not None
    assert ask(received(marker), TICKET) is runs
    shown = [line for line in typed if line.strip() in ("s", "show")]
    assert terminal.text.count("run it here? [y/N/show] ") == 1 + len(shown)
    # Here pydoc has no terminal, and prints.
    assert capsys.readouterr().out.count("=== train.py (") == len(shown)
    assert not marker.exists()


def test_without_a_terminal_nobody_is_asked():
    assert ask_in(Terminal(is_one=False), Terminal()) is None
    assert ask_in(Terminal(), Terminal(is_one=False)) is None


def test_the_question_names_everything_that_decides_it(marker):
    code = received(marker, imports={"rich": "rich", "not_there": "PyYAML", "left": ""}, helper="x = 1\n")
    code = ReceivedCode(code.bundle, Offer(**{**_fields(code.offer), "reads_data": True}))
    text = "\n".join(description(code, TICKET))
    for part in (
        "10.0.0.1:5555, fingerprint 6666666666666666…",
        "helper.py  6 B",
        f"job train.py, sha256 {code.bundle.sha256}",
        "PyYAML 6.0.1",
        "not here: not_there (installed there as PyYAML 6.0.1)",
        "not here: left (not sent)",
        "data() of the job runs here too",
        "could do all that you can do",
    ):
        assert part in text
    assert "not here: rich" not in text


def _fields(offer: Offer) -> dict[str, object]:
    return {name: getattr(offer, name) for name in offer.__struct_fields__}


def test_nothing_in_a_file_is_hidden_or_obeyed():
    text = "a = 1\r\nb = '\u202e'\x1b[2J\n\tc = 2\rd" + " " * 100 + "; import os\n\x0c\u200b\u00a0\n"
    lines = listing(CodeBundle.of("train.py", {"train.py": text.encode(), "z.py": b""}), 60)
    assert lines == [
        "",
        f"=== train.py ({len(text.encode())} B, 5 lines) ====================",
        "     1 | a = 1",
        "     2 | b = '<U+202E>'<U+001B>[2J",
        "     3 |     c = 2",
        "     4 | d",
        "     … | " + " " * 50 + ";",
        "     … |  import os",
        "     5 | <U+000C><U+200B><U+00A0>",
        "",
        "=== z.py (0 B, 0 lines) ====================",
    ]
