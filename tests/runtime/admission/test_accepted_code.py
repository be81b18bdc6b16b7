"""Code that was accepted: remembered for one coordinator, and kept in a folder with nothing else in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from w5xde.errors import StorageError
from w5xde.learn.job.code.bundle import CodeBundle
from w5xde.runtime.admission.accepted_code import HASHES_MAX, KEPT_SECONDS, AcceptedCode, store

CODE = CodeBundle.of(
    "train.py", {"train.py": b"import lib.a\n", "lib/a.py": b"x = 1\n", "lib/__init__.py": b""}
)
A, B = "a" * 64, "b" * 64


def files_in(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_consent_is_for_one_coordinator_and_one_hash(tmp_path):
    AcceptedCode("pool", tmp_path).remember(A)
    assert A in AcceptedCode("pool", tmp_path)
    assert B not in AcceptedCode("pool", tmp_path)
    assert A[:12] not in AcceptedCode("pool", tmp_path)
    assert A not in AcceptedCode("other", tmp_path)


def test_the_oldest_consents_are_forgotten_first(tmp_path, monkeypatch):
    monkeypatch.setattr("w5xde.runtime.admission.accepted_code.HASHES_MAX", 3)
    accepted = AcceptedCode("pool", tmp_path)
    for number in (0, 1, 2, 0, 3):
        accepted.remember(f"{number:064}")
    assert [f"{number:064}" in accepted for number in range(4)] == [True, False, True, True]
    assert HASHES_MAX == 1000


@pytest.mark.parametrize("content", [b"", b"{}", b'{"sha256":"0","sealed":{}}', b"\xff"])
def test_a_damaged_memory_is_no_consent(tmp_path, content):
    accepted = AcceptedCode("pool", tmp_path)
    accepted.remember(A)
    file = tmp_path / "nodes" / "pool" / "code.json"
    file.write_bytes(content)
    assert A not in accepted
    accepted.remember(B)
    assert B in accepted
    assert A not in accepted


def test_a_memory_that_others_could_have_written_is_an_error(tmp_path):
    accepted = AcceptedCode("pool", tmp_path)
    accepted.remember(A)
    (tmp_path / "nodes" / "pool" / "code.json").chmod(0o666)
    with pytest.raises(StorageError) as caught:
        assert A in accepted
    assert caught.value.code == "W5-410"


def test_files_lie_in_a_private_folder_that_their_hash_names(tmp_path):
    folder = store(CODE, tmp_path)
    assert folder == tmp_path / "code" / CODE.sha256
    assert files_in(folder) == CODE.files
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_files_that_are_there_already_are_left_alone(tmp_path):
    before = (store(CODE, tmp_path) / "train.py").stat()
    after = (store(CODE, tmp_path) / "train.py").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def _plant_compiled(folder: Path) -> None:
    (folder / "__pycache__").mkdir(mode=0o700)
    (folder / "__pycache__" / "train.cpython-311.pyc").write_bytes(b"evil")


def _plant_link(folder: Path) -> None:
    (folder / "train.py").unlink()
    (folder / "train.py").symlink_to(folder / "lib" / "a.py")


@pytest.mark.parametrize(
    "spoil",
    [
        _plant_compiled,
        _plant_link,
        lambda folder: (folder / "train.py").write_bytes(b"import lib.b\n"),
        lambda folder: (folder / "train.py").unlink(),
        lambda folder: (folder / "json.py").touch(mode=0o600),
        lambda folder: (folder / "lib" / "b").mkdir(),
        lambda folder: (folder / "train.py").chmod(0o666),
    ],
    ids=["compiled file", "link", "changed", "gone", "more files", "more folders", "open to others"],
)
def test_a_folder_with_anything_else_is_made_anew(tmp_path, spoil):
    spoil(store(CODE, tmp_path))
    folder = store(CODE, tmp_path)
    assert files_in(folder) == CODE.files
    assert not (folder / "train.py").is_symlink()
    assert stat.S_IMODE((folder / "train.py").stat().st_mode) == 0o600


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path):
    elsewhere = tmp_path / "precious"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (tmp_path / "code").mkdir(mode=0o700)
    (tmp_path / "code" / CODE.sha256).symlink_to(elsewhere)
    with pytest.raises(StorageError) as caught:
        store(CODE, tmp_path)
    assert caught.value.code == "W5-411"
    assert [path.name for path in elsewhere.iterdir()] == ["file"]


def test_folders_that_nobody_used_for_long_are_removed(tmp_path):
    old = store(CODE, tmp_path)
    os.utime(old, (1, 1))
    other = CodeBundle.of("train.py", {"train.py": b""})
    store(other, tmp_path)
    assert not old.exists()
    recent = store(CODE, tmp_path)
    then = recent.stat().st_mtime - KEPT_SECONDS / 2
    os.utime(recent, (then, then))
    store(other, tmp_path)
    assert recent.exists()
