"""The measurement of codecs: real gradients, every codec, plain data."""

from __future__ import annotations

import json

from w5xde.bench import codecs


def test_every_codec_is_measured_on_every_payload(monkeypatch):
    monkeypatch.setattr(codecs, "STEPS", 1)
    monkeypatch.setattr(codecs, "SPECS", ("none", "lz4", "int8 | zstd:1"))  # zlib takes seconds
    found = codecs.measure(0.0)
    assert json.loads(json.dumps(found)) == found
    assert [(row["payload"], row["spec"]) for row in found["rows"]] == [
        (payload, spec) for payload in ("digits", "text", "text, large") for spec in codecs.SPECS
    ]
    assert max(row["raw_bytes"] for row in found["rows"]) > 4_000_000
    for row in found["rows"]:
        assert 0 < row["ratio"] <= 1.001
        assert row["encode_bytes_per_second"] > 0
        assert row["decode_bytes_per_second"] > 0
    assert {row["spec"]: row["ratio"] for row in found["rows"]}["int8 | zstd:1"] < 0.26
    assert found["memcpy_bytes_per_second"] > 0
