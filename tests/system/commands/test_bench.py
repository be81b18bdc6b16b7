"""Benchmarks are not timed here: each must run, say all that it promises, and nothing that is not so."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import resource
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import ROOT
from tests.system.commands.benches import run_benches
from w5xde.bench import benches, command, learn_command
from w5xde.bench.contestants.light_nodes import Crowd
from w5xde.bench.engines.suite import ENGINE_ROWS
from w5xde.bench.measure.processes import crew, run_apart
from w5xde.bench.measure.relay import Bucket
from w5xde.bench.measure.stats import compare
from w5xde.bench.show import plots as plot
from w5xde.bench.show import tables as report
from w5xde.bench.suites import codecs, costs, links
from w5xde.bench.suites.checks import TURN_SECONDS, CheckTurns
from w5xde.bench.suites.learn import LEARN_ROWS
from w5xde.bench.suites.learn_jobs import LEARN_JOBS
from w5xde.bench.suites.peers import MATCHES
from w5xde.bench.suites.stages import STAGES, STUDIES
from w5xde.cli.main import main
from w5xde.errors import TrainingError, UsageError
from w5xde.runtime.durable.audit import audit_run
from w5xde.runtime.net.sockets import HAS_LOCAL_SOCKETS
from w5xde.runtime.system.capacity import require_descriptors

# The benchmarks run once for all tests of this file, so one worker must have them all.
pytestmark = pytest.mark.xdist_group("bench")
PNG = b"\x89PNG\r\n\x1a\n"
COMMANDS = {
    "seed": ["--nodes", "3", "--seconds", "1", "--runs", "runs"],
    "evolution": ["--studies", "stages,logging", "--nodes", "2", "--seconds", "0.3"],
    "exchange": ["--params", "1e4,3e4", "--nodes", "2", "--seconds", "0.3", "--optimizer", "adam"],
    "links": ["--rates", "1000", "--params", "2e4", "--seconds", "0.4", "--codec", "none", "--codec", "auto"],
    "peers": ["--rows", "seed-sync,seed-ray", "--nodes", "2", "--pairs", "3", "--seconds", "0.4"],
    "costs": ["--rows", "tls-async,checks-sync", "--nodes", "2", "--pairs", "3", "--seconds", "0.8"],
    "scale": ["--nodes", "2,6", "--seconds", "0.4"],
}


# Not by module: pytest would make it twice if other tests run between those of this module.
@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="session")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What each benchmark prints with --json; its picture is drawn too."""
    calls = {name: [name, *words] for name, words in COMMANDS.items()}
    # A benchmark does not take the user's own settings.
    return run_benches(calls, folder, {"W5XDE_BATCH_SIZE": "7", "W5XDE_SEED": "5"})


def test_the_seeds_report_is_complete_and_every_ratio_is_the_quotient_of_its_figures(results):
    seed = results["seed"]
    assert seed["batches_per_second"] == pytest.approx(seed["window_batches"] / seed["window_seconds"])
    assert seed["batches_per_second_whole"] == pytest.approx(seed["batches"] / seed["seconds"])
    limits = [limit["batches_per_second"] for limit in seed["limits"]]
    assert len(limits) == 2
    assert seed["limit_batches_per_second"] == pytest.approx(statistics.mean(limits))
    assert seed["limit_ratio"] == pytest.approx(seed["batches_per_second"] / seed["limit_batches_per_second"])
    assert seed["cpu_us_per_batch_outside"] == pytest.approx(
        seed["cpu_us_per_batch"] - min(seed["cpu_us_per_batch_computing"], seed["cpu_us_per_batch_limit"])
    )
    counts = seed["batches_per_node"].values()
    assert seed["fairness"] == pytest.approx(max(counts) / min(counts))
    # Fewer, if the last ones lack a batch that somebody had in hand.
    assert 0 < seed["epochs"] <= seed["batches"] // 32
    assert seed["memory_pss_bytes"] > 10**7
    assert seed["loss_average"] > 0
    assert {"loss_first", "loss_last", "loss_all_samples"} <= set(seed)
    # So small that nothing is compressed.
    assert seed["compression_ratio"] == 1.0
    assert 0 <= seed["staleness_mean"] <= seed["staleness_max"] <= 48
    assert seed["batches_relent"] >= 0
    assert [node["batches"] for node in seed["per_node"]] == list(counts)
    assert seed["batch_size"] == 32
    assert seed["parameters"] == 430


def test_the_seeds_effective_rate_is_that_of_a_plain_loop_to_the_same_loss(results):
    seed = results["seed"]
    assert seed["effective_plain_batches"] > 0
    if seed["effective_seconds"] is None:
        # With so little time the target may be out of reach: then there is no rate, and not a wrong one.
        assert seed["effective_batches_per_second"] is None
    else:
        assert seed["effective_batches_per_second"] == pytest.approx(
            seed["effective_plain_batches"] / seed["effective_seconds"]
        )


def test_only_what_the_ledger_has_is_counted(results, folder):
    seed = results["seed"]
    found = audit_run(folder / "runs" / seed["run"])
    assert found.is_clean
    assert seed["audit_clean"]
    assert seed["batches"] == seed["ledger_batches"] == found.findings.batches
    assert seed["batches_per_node"] == {name: part.batches for name, part in found.findings.nodes.items()}
    assert seed["window_batches"] <= seed["batches"]
    for row in (*results["exchange"]["rows"], *results["scale"]["rows"], *results["evolution"]["rows"]):
        assert row["audit_clean"]
        assert row["batches"] == row["ledger_batches"]


def test_an_exchange_stands_beside_the_bare_stream_and_gloo(results):
    exchange = results["exchange"]
    assert [(row["parameters"], row["nodes"], row["road"]) for row in exchange["rows"]] == [
        (parameters, 2, road) for parameters in (10_000, 30_000) for road in ("tcp", "unix", "shared")
    ]
    default = "unix" if HAS_LOCAL_SOCKETS else "tcp"
    for row in exchange["rows"]:
        stream = "tcp" if row["road"] == "tcp" else default
        limit = exchange[f"{stream}_bytes_per_second"] / (row["nodes"] * 2 * 4 * row["parameters"])
        assert row["limit_exchanges_per_second"] == pytest.approx(limit)
        assert row["exchanges_per_second"] == pytest.approx(row["exchanges"] / row["window_seconds"])
        assert row["limit_ratio"] == pytest.approx(row["exchanges_per_second"] / limit)
        assert row["gloo_ratio"] == pytest.approx(
            row["exchanges_per_second"] / row["gloo_exchanges_per_second"]
        )
        # Parameters, two of Adam's for each, and one accumulator.
        assert row["coordinator_state_bytes"] == 4 * 4 * row["parameters"]
        assert row["coordinator_memory_ratio"] == pytest.approx(
            row["coordinator_memory_bytes"] / row["coordinator_state_bytes"]
        )


def test_codecs_on_a_link_take_turns_and_auto_stands_beside_the_best_and_raw(results):
    found = results["links"]
    [row] = found["rows"]
    assert row["mbit_per_second"] == 1000
    assert [turn["codec"] for turn in row["turns"]] == ["none", "auto", "none", "auto"]
    for turn in row["turns"]:
        assert turn["batches_per_second"] == pytest.approx(turn["window_batches"] / turn["window_seconds"])
        assert turn["audit_clean"]
        assert turn["window_batches"] <= turn["batches"] == turn["ledger_batches"]
        assert sum(turn["batches_per_node"].values()) == turn["batches"]
        # Each batch brings a gradient, and nothing was counted that never travelled.
        assert turn["bytes_up_per_batch"] * turn["compression_ratio"] > 4 * found["parameters"] / 2
    speeds = {
        codec: max(turn["batches_per_second"] for turn in row["turns"] if turn["codec"] == codec)
        for codec in ("none", "auto")
    }
    assert row["batches_per_second"] == speeds
    assert row["best"] == "none"
    assert row["auto_over_best"] == row["auto_over_raw"] == pytest.approx(speeds["auto"] / speeds["none"])
    assert row["auto_lossy_over_best"] is None
    assert found["lossy"] == []


def test_a_link_carries_no_more_than_its_rate_and_a_burst():
    bucket = Bucket(1e6, now=0.0)
    passed, now = 0, 0.0
    for _ in range(1000):
        now += bucket.wait_seconds(now)
        free = bucket.free(now)
        assert free > 0
        bucket.take(free)
        passed += free
        assert passed <= bucket.size + 1e6 * now + 1
    assert passed > 1e6 * now - bucket.size
    # What nobody used is not saved up for ever.
    assert bucket.free(now + 3600) == bucket.size


def test_a_codec_that_may_round_in_one_direction_is_lossy():
    assert [codec for codec in links.CODECS if links.is_lossy(codec)] == [
        "bf16",
        "up: int8, down: bf16",
        "auto:lossy",
    ]
    assert links.is_lossy("down: fp16")
    assert not links.is_lossy("up: shuffle | zstd:3")


def test_peers_are_compared_in_pairs_and_every_row_is_there(results):
    peers = results["peers"]
    measured, ray = peers["rows"]
    assert [row["row"] for row in peers["rows"]] == ["seed-sync", "seed-ray"]
    assert (ray["status"] == "not installed") == (importlib.util.find_spec("ray") is None)
    pairs = list(zip(measured["ours"], measured["theirs"], strict=True))
    # The first of three is dropped.
    assert len(pairs) == 2
    assert measured["ratios"] == pytest.approx(
        [ours["batches_per_second"] / theirs["batches_per_second"] for ours, theirs in pairs]
    )
    assert measured["ratio"] == pytest.approx(statistics.median(measured["ratios"]))
    for one in (*measured["ours"], *measured["theirs"]):
        assert one["batches_per_second"] == pytest.approx(one["batches"] / one["seconds"])
        assert one["loss_all_samples"] > 0
    for ours in measured["ours"]:
        assert ours["audit_clean"]
        assert ours["ledger_batches"] == ours["batches_in_all"]


def test_costs_are_compared_in_turns_with_what_was_asked(results):
    tls, checks = results["costs"]["rows"]
    assert [row["row"] for row in (tls, checks)] == ["tls-async", "checks-sync"]
    assert (tls["asked"], checks["asked"]) == (0.35, 0.05)
    for row in (tls, checks):
        pairs = zip(row["with"], row["without_it"], strict=True)
        assert row["ratios"] == pytest.approx([with_it / without for with_it, without in pairs])
        assert row["cost"] == pytest.approx(1 - statistics.median(row["ratios"]))
        assert row["cost_low"] <= row["cost"] <= row["cost_high"]
        assert row["verdict"] == costs.verdict(row["cost_low"], row["cost_high"], row["asked"])
        assert row["audit_clean"]
        for run in row["runs"]:
            assert run["batches_per_second"] == pytest.approx(run["batches"] / run["seconds"])
            assert run["ledger_batches"] == run["batches_in_all"]


def test_what_is_called_encrypted_is_and_what_is_not_is_not(results):
    tls, checks = results["costs"]["rows"]
    # Two pairs, as the first of three is dropped: those with it, then those without.
    assert [run["is_encrypted"] for run in tls["runs"]] == [True, True, False, False]
    rates = [run["batches_per_second"] for run in tls["runs"]]
    assert tls["with"] + tls["without_it"] == pytest.approx(rates)
    assert not any(run["is_encrypted"] for run in checks["runs"])
    assert tls["coordinator_cpu_part"] is None


def test_checks_are_left_out_every_other_turn_and_their_time_is_counted(results):
    checks = results["costs"]["rows"][1]
    assert len(checks["runs"]) == 3
    for run in checks["runs"]:
        assert len(run["checks"]["looking"]) - len(run["checks"]["blind"]) in (0, 1)
    spent, looking = (
        sum(run["checks"][key] for run in checks["runs"]) for key in ("cpu_seconds", "look_cpu_seconds")
    )
    assert checks["coordinator_cpu_part"] == pytest.approx(looking / spent)
    assert 0 < looking < spent


def test_with_closed_eyes_nothing_is_looked_at():
    def turns() -> dict[str, bool]:
        from w5xde.control.trust.norm_limits import NormLimits

        found = {}
        checks = CheckTurns()
        checks.start()
        limit = NormLimits("1.5")
        for batches, name in enumerate(("looking", "blind", "looking again")):
            checks.turn(batches * TURN_SECONDS, batches)
            found[name] = limit.of(1) == 1.5
        return found

    assert run_apart(lambda line: turns(), "eyes", 5.0) == {
        "looking": True,
        "blind": False,
        "looking again": True,
    }


def test_a_cost_is_kept_or_missed_only_if_the_whole_interval_is():
    assert costs.verdict(-0.02, 0.04, 0.05) == "kept"
    assert costs.verdict(0.04, 0.06, 0.05) == "not sure"
    assert costs.verdict(0.06, 0.09, 0.05) == "missed"


def test_more_connections_are_compared_with_the_first_row(results):
    first, second = results["scale"]["rows"]
    assert first["ratio_to_first"] == 1.0
    assert second["ratio_to_first"] == pytest.approx(
        second["updates_per_second"] / first["updates_per_second"]
    )
    for row in (first, second):
        assert row["updates_per_second"] == pytest.approx(row["updates"] / row["window_seconds"])
        assert 0 < row["latency_p50_seconds"] <= row["latency_p99_seconds"] <= row["latency_most_seconds"]
        assert row["connections_lost"] == 0
        assert row["updates"] <= row["batches"]
        assert row["staleness"] is None
        assert row["staleness_mean"] <= row["staleness_max"] <= 48


def test_every_stage_of_the_first_system_has_a_row_and_was_really_so(results):
    rows = results["evolution"]["rows"]
    assert [row["stage"] for row in rows if row["study"] == "stages"] == [stage.name for stage in STAGES]
    assert [row["stage"] for row in rows if row["study"] == "logging"] == ["verbose", "normal", "silent"]
    for row in rows:
        assert row["note"]
        assert 0 < (row["socket_buffer_bytes"] or 1) <= row["settings"].get("socket_buffer", 1)
        is_pickled = "pickled" in row["settings"].get("compress", "")
        # A pickle takes nine bytes for a number of four; what fits a few packets, auto sends as it is.
        assert (row["compression_ratio"] < 0.95) == is_pickled
        assert (row["compression_ratio_of_pickles"] is not None) == is_pickled
        if row["settings"].get("compress", "auto") == "auto":
            assert row["compression_ratio"] == 1.0
        assert row["batches_per_second_whole"] == pytest.approx(row["batches"] / row["seconds"])
    assert rows[0]["compression_ratio_of_pickles"] == pytest.approx(1.0, abs=1e-6)
    assert all(row["compression_ratio_of_pickles"] > 1.2 for row in rows[1:3])
    # A fixed codec is applied even where it gains nothing.
    assert rows[7]["compression_ratio"] != 1.0
    assert rows[7]["then"]["batches"] == 24_373


def test_pictures_are_drawn(results, folder):
    for name in results:
        assert (folder / f"{name}.png").read_bytes().startswith(PNG), name


def test_results_are_shown_as_tables_too(results, capsys):
    for result in results.values():
        report.show(result, sys.stdout)
    shown = capsys.readouterr().out
    for word in (
        "most/least",
        "reported",
        "exchanges/s",
        "not installed",
        "updates/s",
        "checks of updates, sync",
        "direct tensors",
        "auto over none",
    ):
        assert word in shown


CODECS = {
    "bench": "codecs",
    "rows": [
        {
            "codec": codec,
            "data": data,
            "raw_bytes": 1000,
            "encoded_bytes": 900,
            "ratio": 1000 / 900,
            "encode_bytes_per_second": 1e9,
            "decode_bytes_per_second": 2e9,
        }
        for codec in ("lz4", "zstd:1")
        for data in ("digits", "text")
    ],
    "memcpy_bytes_per_second": 9e9,
    "machine": {"cores": 2, "processor": "x", "python": "3", "torch": "2", "torch_threads": 1},
}


def test_codecs_are_shown_and_drawn(tmp_path, capsys):
    report.show(CODECS, sys.stdout)
    assert "zstd:1" in capsys.readouterr().out
    plot.draw(CODECS, tmp_path / "codecs.png")
    assert (tmp_path / "codecs.png").read_bytes().startswith(PNG)


def test_codecs_are_a_command_too(monkeypatch, capfd):
    measured = {key: CODECS[key] for key in ("rows", "memcpy_bytes_per_second")}
    monkeypatch.setattr(codecs, "measure", lambda seconds: measured)
    assert main(["bench", "codecs", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert {key: found[key] for key in measured} == measured
    assert found["bench"] == "codecs"


# --- what it is made of -----------------------------------------------------------------------------


def test_a_verdict_needs_the_whole_interval_on_one_side():
    assert compare([1.2, 1.3, 1.25, 1.4]).verdict == "ahead"
    assert compare([0.8, 0.7, 0.75, 0.9]).verdict == "behind"
    assert compare([0.8, 1.3, 1.25, 0.9]).verdict == "even"
    assert compare([1.0, 2.0, 3.0]) == compare([1.0, 2.0, 3.0])


def test_the_command_knows_every_row_and_every_study():
    assert tuple(MATCHES) == benches.MATCH_NAMES
    assert tuple(LEARN_JOBS) == learn_command.LEARN_JOB_NAMES
    assert tuple(LEARN_ROWS) == learn_command.LEARN_ROW_NAMES
    parser = command.build_parser()
    assert parser.parse_args(["peers"]).rows == tuple(MATCHES)
    assert parser.parse_args(["engines"]).rows == tuple(ENGINE_ROWS)
    assert parser.parse_args(["costs"]).rows == tuple(costs.COSTS)
    assert parser.parse_args(["evolution"]).studies == tuple(STUDIES)


def test_the_measured_job_is_the_example_at_one_learning_rate():
    from w5xde.bench import jobs
    from w5xde.learn.job.build import build_model
    from w5xde.learn.job.job import load_job

    example = load_job(str(ROOT / "examples" / "seed_mlp.py"))
    for mine, theirs in zip(jobs.seed.data().tensors, example.data().tensors, strict=True):
        assert mine.equal(theirs)
    models = [build_model(job, 0) for job in (jobs.seed, example)]
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert mine.equal(theirs)
    optimizers = [
        job.optimizer(model.parameters()) for job, model in zip((jobs.seed, example), models, strict=True)
    ]
    mine, theirs = (optimizer.defaults for optimizer in optimizers)
    assert mine | {"lr": theirs["lr"]} == theirs
    assert jobs.seed.scheduler is None


def test_who_fails_says_so_and_nobody_is_left_behind():
    told = pytest.raises(TrainingError, match="the second: ValueError: so it goes")
    with crew({"the first": lambda line: line.hear(), "the second": _fail}, 1.0) as members, told as failure:
        members[1].hear()
    assert failure.value.code == "W5-320"
    assert not any(psutil.pid_exists(member.pid) for member in members)


def _fail(line: object) -> None:
    raise ValueError("so it goes")


def test_who_is_killed_is_missed_at_once():
    with pytest.raises(TrainingError, match="the victim ended without a word"):
        run_apart(lambda line: os.kill(os.getpid(), signal.SIGKILL), "the victim", 1.0)


# --- what is typed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["seed", "--nodes", "0"], "--nodes"),
        (["seed", "--nodes", "2.5"], "whole number"),
        (["seed", "--seconds", "soon"], "'soon' is not a number"),
        (["seed", "--seconds", "nan"], "--seconds"),
        (["seed", "--plot", "seed.jpg"], "must end in .png"),
        (["seed", "--plot", "nowhere/seed.png"], "there is no folder"),
        (["exchange", "--params", "1e6,many"], "'many' is not a number"),
        (["peers", "--rows", "seed-async,seed"], "'seed' is none of"),
        (["costs", "--rows", "tls"], "'tls' is none of"),
        (["engines", "--rows", "kills"], "'kills' is none of"),
        (["engines", "--nodes", "65"], "--nodes"),
        (["scale", "--nodes", ""], "--nodes"),
        (["learn", "--jobs", "sonnets"], "'sonnets' is none of"),
        (["learn", "--seeds", "0"], "--seeds"),
        (["learn", "--sizes", "--tensors", "3"], "--tensors"),
        (["links", "--codec", "zst"], "did you mean 'zstd'?"),
        (["links", "--rates", "100,fast"], "'fast' is not a number"),
        (["race"], "invalid choice: 'race'"),
        (["seed", "--secs", "3"], "Did you mean --seconds?"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_measured(words, complaint, capsys):
    assert main(["bench", *words]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.out == ""


def test_without_matplotlib_a_picture_is_refused_with_the_line_that_installs_it(
    monkeypatch, capsys, tmp_path
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
    )
    assert main(["bench", "seed", "--plot", str(tmp_path / "seed.png")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error[W5-240]: ")
    assert 'pip install "w5xde[bench]"' in told


def test_more_connections_than_the_system_allows_are_refused():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(UsageError, match="open files") as refused:
            require_descriptors(10**9)
    finally:
        # It tried to be allowed more.
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert refused.value.code == "W5-241"


async def _incomplete() -> None:
    Crowd(3, 0.01).require_everybody()


def test_a_crowd_that_is_not_complete_says_how_many_are_missing():
    with pytest.raises(TrainingError, match="3 of 3 light nodes could not join") as missing:
        asyncio.run(_incomplete())
    assert missing.value.code == "W5-321"


def test_help_has_examples(capsys):
    for name in command.BENCHES:
        with pytest.raises(SystemExit):
            main(["bench", name, "--help"])
        shown = capsys.readouterr().out
        assert f"w5xde bench {name}" in shown.partition("examples:")[2]
