"""What the properties found, each once more as a story of its own."""

from __future__ import annotations

import pytest

from tests.security import files
from w5xde.errors import StorageError
from w5xde.runs import MANIFEST, read_manifest
from w5xde.runtime.ledger import Reading
from w5xde.runtime.seal import Damaged
from w5xde.runtime.store import Store

NOT_UTF8 = b'{"kind":"\xff"}'


def test_a_manifest_with_a_right_hash_and_text_that_is_not_utf8_is_damaged():
    name = "checkpoints/step-000000001/manifest.json"
    disk = files.disk_with({name: files.sealed_manifest(b'{"format":1,"facts":{"a":"\xff"}}')})
    with pytest.raises(Damaged, match="makes no sense"):
        Store(disk).read(1)


@pytest.mark.parametrize("line", [0, 1])
def test_a_line_of_the_ledger_with_a_right_hash_and_text_that_is_not_utf8_is_damage(line):
    head = b'{"kind":"segment","number":1,"after":"%s","records":0,"life":1}' % files.NOTHING.encode()
    lines = [head, b'{"kind":"joined"}']
    lines[line] = NOT_UTF8
    reading = Reading(files.disk_with({"ledger-000001.jsonl": files.ledger_of(lines)}))
    assert list(reading.records()) == []
    assert reading.damage == [f"ledger-000001.jsonl: line {line + 1} is not what was written"]


@pytest.mark.parametrize("data", [NOT_UTF8, b"[" * 100_000])
def test_a_run_whose_manifest_is_nonsense_is_refused_with_a_sentence(data, tmp_path):
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(StorageError, match="cannot be read"):
        read_manifest(tmp_path)
