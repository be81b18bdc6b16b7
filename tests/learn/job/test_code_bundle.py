"""A bundle of code: one hash for names and contents, and what is shown is what Python runs."""

from __future__ import annotations

import hashlib
import random

import pytest

from w5xde.errors import RemoteProtocolError
from w5xde.learn.job.code.bundle import BadCode, CodeBundle
from w5xde.message_types import CODE_BYTES_MAX, CODE_FILES_MAX
from w5xde.messages import Offer

FILES = {"train.py": b"import lib.a\n", "lib/a.py": b"x = 1\n", "lib/__init__.py": b""}


def bundle(job: str = "train.py", **changes: bytes) -> CodeBundle:
    return CodeBundle.of(
        job, FILES | {name.replace("__", "/") + ".py": text for name, text in changes.items()}
    )


def refused(job: str, files: dict[str, bytes]) -> str:
    with pytest.raises(BadCode) as caught:
        CodeBundle.of(job, files)
    return str(caught.value)


def test_the_hash_is_that_of_the_documented_lines():
    lines = ["w5xde code 1", "train.py:small"]
    lines += [f"{hashlib.sha256(FILES[name]).hexdigest()}  {name}" for name in sorted(FILES)]
    text = "".join(f"{line}\n" for line in lines)
    assert bundle("train.py:small").sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_the_hash_does_not_depend_on_the_order_and_depends_on_everything_else():
    names = list(FILES)
    random.Random(1).shuffle(names)
    assert CodeBundle.of("train.py", {name: FILES[name] for name in names}) == bundle()
    others = [
        bundle("train.py:small"),
        bundle(train=b"import lib.a \n"),
        bundle(more=b""),
        CodeBundle.of("train.py", {name: FILES[name] for name in ("train.py", "lib/a.py")}),
        CodeBundle.of("train.py", {"train.py": FILES["train.py"], "lib/b.py": FILES["lib/a.py"]}),
        # The same bytes, cut at another place.
        CodeBundle.of(
            "train.py", {"train.py": b"import lib.a", "lib/a.py": b"\nx = 1\n", "lib/__init__.py": b""}
        ),
    ]
    assert len({each.sha256 for each in [bundle(), *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    "name",
    [
        "../x.py", "/etc/x.py", "a/../b.py", "a//b.py", "./x.py", ".hidden.py", "a/.b.py", "x.pyc", "x", "",
        "x.py/y.py", "a\\b.py", "C:x.py", "x .py", "x\n.py", "x.py\n", "\x1b[2Jx.py", "x\u202e.py", "é.py",
        "x\0.py", "-x.py", "a/b/c/d/e/f/g/h/i.py", "a" * 65 + ".py", "/".join(["a" * 60] * 4) + ".py",
    ],
)  # fmt: skip
def test_a_name_that_could_leave_its_folder_or_fool_a_reader_is_refused(name):
    assert "is not the name of a file" in refused("train.py", FILES | {name: b""})


@pytest.mark.parametrize(
    "job", ["lib/a.py", "other.py", "train.py:", "train.py:a b", "train", "../train.py", "train.py:a:b"]
)
def test_a_job_that_is_not_one_of_the_files_is_refused(job):
    assert job in refused(job, FILES)


@pytest.mark.parametrize(
    "name", ["json.py", "torch.py", "torch/nn.py", "numpy/__init__.py", "w5xde/api.py", "random.py"]
)
def test_a_file_that_would_replace_an_installed_module_is_refused(name):
    assert "would take the place of the module" in refused("train.py", FILES | {name: b""})


@pytest.mark.parametrize("name", ["Train.py", "lib/A.py", "LIB/b.py"])
def test_two_names_that_are_one_on_some_disks_are_refused(name):
    assert "one name on some disks" in refused("train.py", FILES | {name: b""})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\xff\xfe", "is not UTF-8"),
        (b"x = '\xe4'", "is not UTF-8"),
        (b"x = 1\0", "null byte"),
        (b"# coding: utf-7\n+AGkAbQBwAG8AcgB0- os", "another encoding"),
        (b"#!/usr/bin/python\n# -*- coding: rot13 -*-\nvzcbeg bf", "another encoding"),
        (b"# x\r# coding=latin-1\r", "another encoding"),
        (b"\x0c# vim: set fileencoding=unicode_escape :\n", "another encoding"),
        (b"# coding: utf-8 coding: utf-16\n", "another encoding"),
    ],
)
def test_a_file_that_python_reads_otherwise_than_it_is_shown_is_refused(content, told):
    assert told in refused("train.py", {"train.py": content})


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n\n\n# coding: latin-1\n", b"# -*- coding: utf-8 -*-\n", b"# coding=UTF8\n",
        b"# coding: utf-8-unix", b"x = open('a', encoding='latin-1')", "# naïve 雪\n".encode(),
        b"\xef\xbb\xbfx = 1\n",
    ],
)  # fmt: skip
def test_a_file_in_utf_8_is_fine(content):
    assert CodeBundle.of("train.py", {"train.py": content}).files["train.py"] == content


def test_there_is_a_limit_to_the_number_and_the_size_of_files():
    many = {f"m{number}.py": b"" for number in range(CODE_FILES_MAX)}
    assert f"{CODE_FILES_MAX + 1} files" in refused("train.py", {"train.py": b"", **many})
    large = {"train.py": b"#" * CODE_BYTES_MAX}
    assert CodeBundle.of("train.py", large).sizes == {"train.py": CODE_BYTES_MAX}
    assert "4,194,305 bytes" in refused("train.py", {**large, "x.py": b"#"})


# --- offers ---------------------------------------------------------------------------------------


def offer(code: CodeBundle, **changes: object) -> Offer:
    fields = {"job": code.job, "files": code.sizes, "sha256": code.sha256}
    return Offer(**(fields | changes))  # type: ignore[arg-type]


def test_what_is_offered_is_what_is_taken_out():
    code = bundle("train.py:small")
    assert CodeBundle.from_offer(offer(code), bytearray(code.body)) == code
    shuffled = dict(reversed(code.sizes.items()))
    body = b"".join(code.files[name] for name in shuffled)
    assert CodeBundle.from_offer(offer(code, files=shuffled), memoryview(body)) == code


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        ({"sha256": "0" * 64}, b"", "its sha256 is"),
        ({"sha256": ""}, b"", "not none"),
        ({"job": "train.py:other"}, b"", "its sha256 is"),
        ({}, b"!", "20 bytes came for files of 19 bytes"),
        (
            {"files": {"train.py": 13, "lib/a.py": 6, "lib/b.py": 7}},
            b"",
            "19 bytes came for files of 26 bytes",
        ),
        ({"files": {"train.py": 19}}, b"", "its sha256 is"),
        ({"files": {"../train.py": 19}}, b"", "train.py"),
    ],
)
def test_an_offer_that_is_not_as_it_says_is_the_peers_error(changes, more, told):
    code = bundle()
    with pytest.raises(RemoteProtocolError, match="code that cannot be taken") as caught:
        CodeBundle.from_offer(offer(code, **changes), bytearray(code.body + more))
    assert caught.value.code == "W5-120"
    assert told in caught.value.what
