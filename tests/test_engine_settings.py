"""Settings of engines: ranges of nodes, labels, and what is refused before any cluster is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from w5xde.errors import UsageError
from w5xde.setting_sources import SettingSources
from w5xde.specs.engine_settings import NodeRange, node_range, parse_labels


def resolve(command: str = "train", *, folder: Path | None = None, **given: object) -> object:
    return SettingSources(command, given, {}, folder).resolve()


@pytest.mark.parametrize(
    ("said", "meant"),
    [(8, NodeRange(8, 8)), ("2..16", NodeRange(2, 16)), ("0..1000", NodeRange(0, 1000)), ("auto", None)],
)
def test_a_number_of_nodes_is_a_range(said: int | str, meant: NodeRange | None) -> None:
    assert node_range(said) == meant


@pytest.mark.parametrize("said", ["2..", "..3", "2...4", "a..b", "2-4", "1001", "3..1001", "-2..4"])
def test_what_is_no_range_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match="nodes") as caught:
        resolve(engine="ray", nodes=said)
    assert caught.value.code == "W5-210"


def test_an_empty_range_is_refused_with_its_fix() -> None:
    with pytest.raises(UsageError, match=r"nodes 5\.\.3 is an empty range") as caught:
        resolve(engine="ray", nodes="5..3")
    assert caught.value.fix == "turn it round: 3..5"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nodes": "2..4"}, "nodes 2..4 is a range, which needs an engine"),
        ({"cpus_per_node": 2}, "cpus-per-node 2.0 is for engines"),
        ({"gpus_per_node": 1}, "gpus-per-node 1.0 is for engines"),
        ({"labels": "a=b"}, "labels a=b is for engines"),
        ({"engine": "ray", "nodes": 0}, "nodes 0 on a cluster would train nothing"),
        ({"engine": "ray", "labels": "spot"}, "labels 'spot' must be like key=value"),
        ({"engine": "slurm"}, "engine 'slurm' must be local or ray"),
        ({"engine": "ray", "cpus_per_node": 0}, "cpus-per-node 0 must be more than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(**given)
    assert told in caught.value.what
    assert caught.value.fix


def test_labels_are_read_with_commas() -> None:
    assert parse_labels("ray.io/market-type=spot, zone=a-1") == {"ray.io/market-type": "spot", "zone": "a-1"}
    assert parse_labels(None) == {}


def test_a_file_may_have_a_range_for_clusters_which_other_commands_pass_over(tmp_path: Path) -> None:
    (tmp_path / "w5xde.toml").write_text('engine = "ray"\nnodes = "2..16"\n')
    assert SettingSources("train", {}, {}, tmp_path).resolve().nodes == "2..16"
    assert SettingSources("serve", {}, {}, tmp_path).resolve().nodes == 0
    assert SettingSources("join", {}, {"W5XDE_NODES": "2..16"}).resolve().nodes == "auto"
