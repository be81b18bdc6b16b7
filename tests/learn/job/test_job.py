"""A job is found by any of its names, and a wrong name is answered with the right one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.processes import run_python
from w5xde.callbacks.ready import EarlyStopping
from w5xde.config import parse_every
from w5xde.errors import JobError, UsageError
from w5xde.learn.job.job import Job, call, describe, load_job
from w5xde.learn.job.named_job import load_named

JOB = "Job(model=print, data=print, loss=print, optimizer=print)"
HEADER = "from w5xde import Job\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; modules imported from it are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def refused(reference: str) -> JobError:
    with pytest.raises(JobError) as caught:
        load_job(reference)
    assert caught.value.exit_code == 20
    return caught.value


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + text, encoding="utf-8")
    return path


# --- a file that trains while it is loaded --------------------------------------------------------


@pytest.mark.parametrize("call", ["w5xde.train(job)", "w5xde.serve(job)", "w5xde.join('w5', job)"])
@pytest.mark.parametrize("reference", ["train.py", "train.py:job", "train", "train:job"])
def test_a_file_that_trains_at_its_top_level_is_refused_with_the_guard(here, call, reference):
    write(here / "train.py", f"import w5xde\njob = {JOB}\n{call}\nopen('trained', 'w')")
    error = refused(reference)
    assert error.code == "W5-242"
    assert call.partition("(")[0] in error.what
    assert 'if __name__ == "__main__":' in error.fix
    assert not (here / "trained").exists()
    # What follows is not refused any more.
    write(here / "train.py", f"import w5xde\njob = {JOB}\nif __name__ == '__main__':\n    {call}")
    sys.modules.pop("train", None)
    assert isinstance(load_job(reference), Job)


def test_a_file_that_a_job_file_imports_is_loaded_with_it(here):
    write(here / "helper.py", f"import w5xde\nw5xde.train({JOB})")
    write(here / "train.py", f"import helper\njob = {JOB}")
    assert refused("train.py").code == "W5-242"


LOOP = """
import torch
weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.sum().backward()
"""


def test_a_loop_of_torch_at_the_top_level_is_refused_too(here):
    """Often a line that was left in when a script was brought over: trainer.fit(), trainer.train()."""
    write(here / "train.py", f"{LOOP}\noptimizer.step()\nopen('trained', 'w')\njob = {JOB}")
    error = refused("train.py")
    assert error.code == "W5-242"
    assert "train.py calls SGD.step() at its top level" in error.what
    assert "(train.py, line 8)" in error.what
    assert 'if __name__ == "__main__":' in error.fix
    assert not (here / "trained").exists()
    # An optimizer that is only made is no loop, and after the file was loaded it may step.
    write(here / "train.py", f"{LOOP}\njob = {JOB}")
    assert isinstance(load_job("train.py"), Job)
    sys.modules["train"].optimizer.step()


# --- found ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reference",
    ["train.py", "./train.py", "train.py:job", "./train.py:job", "train", "train:job", "train.py:"],
)
def test_a_job_in_the_working_folder_is_found_by_any_name(here, reference):
    write(here / "train.py", f"job = {JOB}")
    assert isinstance(load_job(reference), Job)


def test_a_job_is_found_by_an_absolute_path(here):
    path = write(here / "elsewhere" / "train.py", f"job = {JOB}")
    assert isinstance(load_job(str(path)), Job)
    assert isinstance(load_job(f"{path}:job"), Job)


@pytest.mark.parametrize("reference", ["orchard.pears:job", "orchard.pears", "orchard/pears.py"])
def test_a_job_in_a_package_is_found(here, reference):
    write(here / "orchard" / "__init__.py", "")
    write(here / "orchard" / "pears.py", f"job = {JOB}")
    assert isinstance(load_job(reference), Job)


def test_a_name_chooses_among_several(here):
    write(here / "train.py", f"small = {JOB}\nlarge = {JOB.replace('model=print', 'model=len')}")
    assert load_job("train.py:large").model is len
    assert load_job("train.py:small").model is print


def test_one_job_under_two_names_is_one_job(here):
    write(here / "train.py", f"job = {JOB}\nalias = job")
    assert isinstance(load_job("train.py"), Job)


def test_a_job_that_was_imported_into_the_file_counts(here):
    write(here / "base.py", f"job = {JOB}")
    write(here / "train.py", "from base import job")
    assert isinstance(load_job("train.py"), Job)


def test_a_file_imports_its_neighbours_from_wherever_it_is_named(here):
    write(here / "far" / "numbers_of_mine.py", "LAYERS = 3")
    write(here / "far" / "train.py", f"from numbers_of_mine import LAYERS\njob = {JOB}")
    assert isinstance(load_job("far/train.py"), Job)


def test_classes_of_a_job_file_know_their_module(here):
    write(
        here / "dressed.py",
        f"from dataclasses import dataclass\n@dataclass\nclass Config:\n    layers: 'int' = 3\njob = {JOB}",
    )
    assert isinstance(load_job("dressed.py"), Job)


def test_a_file_named_as_a_module_of_pythons_own_is_loaded_all_the_same(here):
    write(here / "statistics.py", f"job = {JOB}")
    assert isinstance(load_job("statistics.py"), Job)


# --- not found ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("trian.py", "train.py"), ("./tran.py", "train.py"), ("jobs/pare.py", "jobs/pear.py")],
)
def test_a_wrong_path_is_answered_with_the_nearest_file(here, wrong, near):
    write(here / "train.py", "")
    write(here / "jobs" / "pear.py", "")
    error = refused(wrong)
    assert error.what == f"there is no job file {wrong}"
    assert error.fix == f"did you mean {near} ?"


def test_a_path_like_nothing_there_is_answered_with_what_to_give(here):
    assert "path of a Python file" in refused("nowhere/train.py").fix
    assert "path of a Python file" in refused("train.py").fix


@pytest.mark.parametrize(
    "reference", ["orchard", "orchard.pears:job", "", ":job", ".pears", "or chard", "..."]
)
def test_a_name_that_is_neither_file_nor_module_is_told(here, reference):
    error = refused(reference)
    assert error.what == f"there is no job {reference!r}: neither a file nor a module of that name"
    assert "train.py:job" in error.fix


def test_a_file_that_is_not_python_is_told(here):
    write(here / "notes.txt", "")
    assert refused("./notes.txt").what == "./notes.txt is not a Python file"


# --- no job in it ---------------------------------------------------------------------------------


def test_a_file_without_a_job_is_told_what_to_write(here):
    write(here / "train.py", "job = None")
    error = refused("train.py")
    assert error.what == "there is no Job in train.py"
    assert "w5xde.Job(model=…, data=…, loss=…, optimizer=…)" in error.fix


def test_several_jobs_and_none_named_lists_them(here):
    write(here / "train.py", f"small = {JOB}\nlarge = {JOB}")
    error = refused("train.py")
    assert error.what == "train.py has 2 jobs: large, small"
    assert error.fix == "name one, for example  train.py:large"


def test_a_wrong_name_is_answered_with_the_nearest_job(here):
    write(here / "train.py", f"small = {JOB}\nlarge = {JOB}")
    error = refused("train.py:smal")
    assert error.what == "there is no 'smal' in train.py"
    assert error.fix == "did you mean train.py:small ?"


def test_a_name_like_no_job_is_answered_with_those_there(here):
    write(here / "train.py", f"small = {JOB}\nlarge = {JOB}")
    assert refused("train.py:x").fix == "jobs there: large, small"


def test_a_name_that_is_not_a_job_is_told_what_it_is(here):
    write(here / "train.py", f"layers = 3\njob = {JOB}")
    error = refused("train.py:layers")
    assert error.what == "layers in train.py is a int, not a w5xde.Job"


# --- a file that fails ----------------------------------------------------------------------------


def test_a_syntax_error_is_told_with_its_line(here):
    write(here / "train.py", "job = (")
    error = refused("train.py")
    assert error.what.startswith("train.py cannot be loaded: SyntaxError: '(' was never closed")
    assert "train.py, line 2" in error.what


def test_an_exception_at_import_is_told_with_the_users_own_line(here):
    write(here / "train.py", "layers = 3\nlayers.append(4)")
    error = refused("train.py")
    assert error.what == (
        "train.py cannot be loaded: AttributeError: 'int' object has no attribute 'append' (train.py, line 3)"
    )
    assert "if __name__ == '__main__':" in error.fix


def test_a_file_that_exits_is_told(here):
    write(here / "train.py", "raise SystemExit(3)")
    assert "SystemExit: 3 (train.py, line 2)" in refused("train.py").what


def test_a_missing_import_of_the_file_is_told(here):
    write(here / "train.py", "import pearwood")
    assert "No module named 'pearwood' (train.py, line 2)" in refused("train.py").what


@pytest.mark.parametrize(
    "text", ["raise RuntimeError('no pears')", "import pearwood", "raise SystemExit('no pears')", "x = ("]
)
def test_a_package_that_fails_is_told_as_such(here, text):
    write(here / "orchard" / "__init__.py", text)
    write(here / "orchard" / "pears.py", f"job = {JOB}")
    error = refused("orchard.pears:job")
    assert "cannot be loaded" in error.what
    assert "pears" in error.what or "pearwood" in error.what


def test_a_module_that_fails_is_told_as_such(here):
    write(here / "orchard.py", "1 / 0")
    assert "orchard cannot be loaded: ZeroDivisionError: division by zero (orchard.py, line 2)" in (
        refused("orchard:job").what
    )


def test_a_wrong_job_in_a_file_is_told_in_its_own_words(here):
    write(here / "train.py", JOB.replace("model=print", "model=3"))
    error = refused("train.py")
    assert error.what == "Job(model=…) is int, not a function (train.py, line 2)"
    assert error.fix == "pass a function: Job(model=lambda: …)"


def test_a_wrong_job_is_named_by_its_line_whichever_job_is_asked_for(here):
    write(here / "train.py", f"good = {JOB}\n\nbad = {JOB.replace('loss=print', 'loss=3')}")
    error = refused("train.py:good")
    assert error.what == "Job(loss=…) is int, not a function (train.py, line 4)"
    assert error.code == "W5-202"


# --- Job ------------------------------------------------------------------------------------------

PARTS = {"model": print, "data": print, "loss": print, "optimizer": print}


@pytest.mark.parametrize("part", [*PARTS, "scheduler", "evaluate"])
def test_every_part_of_a_job_must_be_a_function(part):
    with pytest.raises(JobError, match=rf"Job\({part}=…\) is int, not a function"):
        Job(**(PARTS | {part: 3}))


@pytest.mark.parametrize(
    ("part", "form"),
    [
        ("model", "lambda: …"),
        ("loss", "lambda model, batch: …"),
        ("optimizer", "lambda params: …"),
        ("callbacks", "lambda: […]"),
    ],
)
def test_the_advice_for_a_wrong_part_has_its_arguments(part, form):
    with pytest.raises(JobError) as caught:
        Job(**(PARTS | {part: []}))
    assert caught.value.fix == f"pass a function: Job({part}={form})"


def test_a_model_itself_is_refused_with_the_function_to_write():
    with pytest.raises(JobError, match=r"Job\(model=…\) is a Linear itself") as caught:
        Job(**(PARTS | {"model": torch.nn.Linear(2, 2)}))
    assert caught.value.fix == "pass a function: Job(model=lambda: Linear(…))"
    assert Job(**(PARTS | {"model": torch.nn.Identity})).model is torch.nn.Identity


def test_an_error_of_ours_in_a_function_of_the_user_keeps_its_code_and_fix():
    with pytest.raises(UsageError) as caught:
        call("callbacks()", lambda: [EarlyStopping("fancy", patience=2)])
    assert caught.value.code == "W5-260"
    assert "mode=" in caught.value.fix


@pytest.mark.parametrize("wrong", [{"model": print}, None, Path("train.py")])
def test_something_that_is_no_job_is_told_what_to_give(wrong):
    with pytest.raises(JobError, match=rf"the job is a {type(wrong).__name__}, neither") as caught:
        load_named(wrong)
    assert caught.value.code == "W5-206"


@pytest.mark.parametrize("part", PARTS)
def test_no_part_but_schedule_and_evaluation_may_be_none(part):
    with pytest.raises(JobError, match=rf"Job\({part}=…\) is NoneType"):
        Job(**(PARTS | {part: None}))
    assert Job(**PARTS).scheduler is None
    assert Job(**PARTS).evaluate is None


def test_naming_a_job_wrongly_is_told_without_loading_torch(here):
    code = (
        "import sys\nfrom w5xde.learn.job.job import load_job\nfrom w5xde.errors import JobError\n"
        "try:\n    load_job('trian.py')\nexcept JobError as error:\n    print(error.what)\n"
        "print('torch' in sys.modules)"
    )
    done = run_python("-c", code, cwd=Path.cwd())
    assert done.stdout.splitlines() == ["there is no job file trian.py", "False"]


def test_an_exception_is_described_in_one_line_of_bounded_length():
    text = describe(ValueError("one\n  two " + "x" * 1000))
    assert "\n" not in text
    assert text.startswith("ValueError: one two xxx")
    assert len(text) < 600
    assert describe(KeyError()) == "KeyError"


def test_an_exception_is_described_by_the_users_line_even_if_pythons_own_code_raised_it(tmp_path):
    def users_code():
        (tmp_path / "not" / "there").mkdir()

    with pytest.raises(FileNotFoundError) as caught:
        users_code()
    line = users_code.__code__.co_firstlineno + 1
    assert describe(caught.value).endswith(f"({Path(__file__).name}, line {line})")


def test_an_exception_is_described_by_the_users_line_even_if_our_own_code_raised_it():
    def users_code() -> None:
        parse_every("never")

    with pytest.raises(ValueError, match="must be like") as caught:
        users_code()
    line = users_code.__code__.co_firstlineno + 1
    assert describe(caught.value).endswith(f"({Path(__file__).name}, line {line})")
