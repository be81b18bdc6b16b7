"""What a coordinator offers: the job file and what --ship names, nothing else; and its versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from w5xde.errors import UsageError
from w5xde.learn.job.code import packages
from w5xde.learn.job.code.offer import JobOffer, offer_of
from w5xde.learn.job.code.origin import JobOrigin
from w5xde.learn.job.code.packages import (
    differences,
    differences_text,
    imported_modules,
    is_importable,
    packages_of,
    versions_of,
)
from w5xde.learn.job.named_job import NamedJob
from w5xde.message_types import CODE_FILES_MAX
from w5xde.messages import Layout, Rules, Welcome


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "train.py": "import helper, layers.deep, torch, msgspec, json\n",
        "helper.py": "import rich\n",
        "layers/__init__.py": "",
        "layers/deep.py": "",
        "layers/data.csv": "1,2",
        "layers/.secret.py": "key = 1",
        "layers/__pycache__/deep.py": "",
        "other.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path.resolve()


def offered(folder: Path, ship: str | None = None, job: str = "train.py") -> JobOffer:
    named = NamedJob(None, str(folder / job))  # type: ignore[arg-type]
    return offer_of(named, ship, reads_data=False)


def names(offer: JobOffer) -> list[str]:
    assert offer.code is not None, offer.reason
    return list(offer.code.files)


def refused(folder: Path, ship: str) -> str:
    with pytest.raises(UsageError) as caught:
        offered(folder, ship)
    assert caught.value.code == "W5-287"
    return caught.value.what


def test_without_ship_the_job_file_alone_is_offered_and_what_it_lacks_is_known(folder):
    offer = offered(folder)
    assert names(offer) == ["train.py"]
    assert offer.left_behind == ("helper.py", "layers")
    assert offer.imports == {"helper": "", "layers": "", "msgspec": "msgspec"}
    assert offer.message().sha256 == offer.sha256 == offer.code.sha256
    assert offered(folder, job="train.py:small").message().job == "train.py:small"


def test_files_and_folders_that_ship_names_go_with_it(folder, monkeypatch):
    offer = offered(folder, "helper.py, layers")
    assert names(offer) == ["helper.py", "layers/__init__.py", "layers/deep.py", "train.py"]
    assert offer.left_behind == ()
    assert offer.imports == {"msgspec": "msgspec", "rich": "rich"}
    assert {"Python", "CPU", "torch", "numpy", "msgspec", "rich"} == set(offer.versions)
    # As seen from here, if not from the job file.
    monkeypatch.chdir(folder.parent)
    assert names(offered(folder, f"{folder.name}/helper.py")) == ["helper.py", "train.py"]
    assert names(offered(folder, str(folder / "layers" / "deep.py"))) == ["layers/deep.py", "train.py"]
    assert "other.py" in names(offered(folder, "."))


def test_what_cannot_be_sent_is_refused_with_its_name(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "far.py"
    elsewhere.write_text("")
    assert "there is no such file" in refused(folder, "nothere.py")
    assert "not a file or folder beside" in refused(folder, str(elsewhere))
    assert "not a file or folder beside" in refused(folder, "..")
    assert "not a Python file" in refused(folder, "layers/data.csv")
    (folder / "random.py").write_text("")
    assert "would take the place of the module random" in refused(folder, "random.py")
    (folder / "latin.py").write_bytes(b"# \xe4")
    assert "latin.py is not UTF-8" in refused(folder, "latin.py")
    (folder / "two words.py").write_text("")
    assert "two words.py" in refused(folder, "two words.py")
    many = folder / "many"
    many.mkdir()
    for number in range(CODE_FILES_MAX + 5):
        (many / f"m{number}.py").touch()
    assert f"at most {CODE_FILES_MAX} are sent" in refused(folder, "many")


def test_no_link_is_followed(folder, tmp_path_factory):
    secret = tmp_path_factory.mktemp("home") / "secret.py"
    secret.write_text("key = 1")
    (folder / "link.py").symlink_to(secret)
    assert "is a link" in refused(folder, "link.py")
    (folder / "layers" / "inner.py").symlink_to(secret)
    assert "is a link" in refused(folder, "layers")
    (folder / "folder").symlink_to(secret.parent)
    assert "is a link" in refused(folder, "folder")
    assert "not a file or folder beside" in refused(folder, "folder/secret.py")


def test_a_run_may_send_nothing(folder):
    offer = offered(folder, "off")
    assert offer.code is None
    assert offer.sha256 == ""
    assert "--ship off" in offer.reason
    assert offer.versions["msgspec"] == versions_of(["msgspec"])["msgspec"]


def test_a_job_file_that_cannot_be_sent_is_no_error_unless_more_was_to_be_sent_with_it(folder):
    (folder / "mein träning.py").write_text("")
    offer = offered(folder, job="mein träning.py")
    assert offer.code is None
    assert "its job file cannot be sent" in offer.reason
    with pytest.raises(UsageError, match="cannot be sent to nodes"):
        offered(folder, "helper.py", job="mein träning.py")


@pytest.mark.parametrize("reference", ["JOB", "package.module:job"])
def test_a_job_that_is_no_file_has_nothing_to_offer(reference):
    named = NamedJob(None, reference)  # type: ignore[arg-type]
    offer = offer_of(named, None, reads_data=False)
    assert offer.code is None
    assert reference in offer.reason
    assert {"Python", "CPU", "torch", "numpy"} == set(offer.versions)
    with pytest.raises(UsageError, match="is not a file") as caught:
        offer_of(named, "helper.py", reads_data=False)
    assert caught.value.code == "W5-287"


# --- imports and versions -------------------------------------------------------------------------


def test_imports_are_read_from_the_syntax_and_nothing_is_imported(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        b"import os, torch.nn as nn, trap_module.inner\nfrom rich.text import Text\nfrom . import near\n"
        b"def f():\n    import late_module\n    from numpy import ndarray\n"
    )
    found = imported_modules([source, b"import second\n", b"this is no Python", b"\xff"])
    assert found == ["late_module", "rich", "second", "trap_module"]
    assert packages_of(found) == {"rich": "rich", "trap_module": ""}
    assert is_importable("trap_module")
    assert "trap_module" not in sys.modules


def test_versions_are_those_of_packages_that_exist_and_can_be_said(monkeypatch):
    known = versions_of(["msgspec", "no-such-package", "msgspec"])
    assert list(known)[:4] == ["Python", "CPU", "torch", "numpy"]
    assert known["Python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert "no-such-package" not in known
    monkeypatch.setattr(packages.metadata, "version", lambda name: "1.0; rm -rf ~")
    assert list(versions_of([])) == ["Python", "CPU"]


def test_only_versions_that_both_have_are_compared():
    theirs = {"Python": "3.11", "torch": "2.13.0", "CPU": "x86_64-AVX2", "numpy": "2.4"}
    own = {"Python": "3.12", "torch": "2.13.0", "CPU": "x86_64-AVX512", "yaml": "6"}
    found = differences(own, theirs, "cpu")
    assert (
        differences_text(found, theirs, "there")
        == "Python 3.12 (there 3.11), CPU x86_64-AVX512 (there x86_64-AVX2)"
    )
    assert differences(own, theirs, "cuda") == {"Python": "3.12"}
    assert differences({}, theirs, "cpu") == {}


def test_a_difference_is_said_once_and_again_when_it_changes():
    origin = JobOrigin("", {"torch": "2.13.0"})

    def welcome(torch: str) -> Welcome:
        rules = Rules("sync", 0, "fp32", 1, "stream")
        return Welcome("run", 1, "node", Layout([]), rules, versions={"torch": torch})

    assert origin.compare(welcome("2.13.0"), "cpu") == ""
    assert "torch 2.13.0 (there 2.12.0)" in origin.compare(welcome("2.12.0"), "cpu")
    assert origin.compare(welcome("2.12.0"), "cpu") == ""
    assert origin.compare(welcome("2.13.0"), "cpu") == ""
    assert "can change bits" in origin.compare(welcome("2.11.0"), "cpu")
