"""The measurement of codecs: real gradients, every codec, plain data."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from w5xde.bench.suites import codecs, pickled
from w5xde.errors import RemoteProtocolError
from w5xde.learn.codecs.pipeline import parse
from w5xde.learn.model.layout import FlatModel, describe


def test_every_codec_is_measured_on_every_payload(monkeypatch):
    monkeypatch.setattr(codecs, "STEPS", 1)
    monkeypatch.setattr(codecs, "SPECS", ("none", "lz4", "int8 | zstd:1"))  # zlib takes seconds
    found = codecs.measure(0.0)
    assert json.loads(json.dumps(found)) == found
    assert [(row["data"], row["codec"]) for row in found["rows"]] == [
        (payload, spec) for payload in ("digits", "text", "text, large") for spec in codecs.SPECS
    ]
    assert max(row["raw_bytes"] for row in found["rows"]) > 4_000_000
    for row in found["rows"]:
        assert row["ratio"] == row["raw_bytes"] / row["encoded_bytes"] > 0.999
        assert row["encode_bytes_per_second"] > 0
        assert row["decode_bytes_per_second"] > 0
    assert {row["codec"]: row["ratio"] for row in found["rows"]}["int8 | zstd:1"] > 1 / 0.26
    assert found["memcpy_bytes_per_second"] > 0


def test_the_first_systems_pickles_come_back_exactly_and_name_nothing():
    pickled.register()
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))
    blueprint = FlatModel(model, describe(model, set())).blueprint
    vector = blueprint.new_vector(torch.device("cpu"))
    for part in vector.parts:
        part.normal_()
    for spec in ("pickled", "pickled | zlib:1", "pickled | lz4"):
        pipeline = parse(spec)
        body = bytearray().join(pipeline.encode(vector.raw, blueprint.moving_groups))
        assert len(body) <= pipeline.encoded_bytes_max(vector.raw.numel(), blueprint.moving_groups)
        back = blueprint.new_vector(torch.device("cpu"))
        pipeline.decode(body, back.raw, blueprint.moving_groups)
        assert all(mine.equal(theirs) for mine, theirs in zip(vector.parts, back.parts, strict=True))
    hostile = torch.frombuffer(bytearray(b"cos\nsystem\n(S'true'\ntR."), dtype=torch.uint8)
    with pytest.raises(RemoteProtocolError, match=r"asks for os\.system"):
        pickled.Pickled().unpack(hostile, vector.raw, blueprint.moving_groups)
