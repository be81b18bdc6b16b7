"""Tables of benchmark results for the terminal; `figures` formats each number. Computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import IO, Any

from rich.console import Console

from w5xde.bench.show import engine_runs, learning, slow_links
from w5xde.bench.show.figures import (
    UNKNOWN,
    count,
    least_and_most,
    loss,
    micros,
    percent,
    rate,
    ratio,
    seconds,
    size,
    speed,
    times,
)
from w5xde.bench.show.layout import facts, rows

PIPED_COLUMNS = 180


def show(found: dict[str, Any], stream: IO[str]) -> None:
    """Print the results of a benchmark as tables."""
    # Do not fold tables for the width of a terminal if the output is not one.
    width = None if stream.isatty() else PIPED_COLUMNS
    out = Console(file=stream, highlight=False, soft_wrap=True, width=width)
    _SHOW[found["bench"]](out, found)
    out.print(machine_line(found["machine"]), style="dim", markup=False)


def machine_line(found: dict[str, Any]) -> str:
    return (
        f"{found['cores']} cores ({found['processor']}), Python {found['python']}, torch {found['torch']}, "
        f"{found['torch_threads']} torch thread in each process"
    )


def show_seed(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench seed[/]  {found['mode']}, {found['nodes']} nodes, {found['parameters']} parameters, "
        f"batches of {found['batch_size']}, {found['batches_per_step']} to a step"
    )
    nodes = found["per_node"]
    speeds = (
        f"[bold]{rate(found['batches_per_second'])}[/] over {seconds(found['window_seconds'])}, after a "
        f"warm-up of {seconds(found['warm_up_seconds'])}; {rate(found['batches_per_second_whole'])} with it"
    )
    effective = (
        f"[bold]{rate(found['effective_batches_per_second'])}[/] batches/s: a plain loop needs "
        f"{count(found['effective_plain_batches'])} batches to a loss of {loss(found['effective_target'])}, "
        f"this run {seconds(found['effective_seconds'])}"
        if found["effective_seconds"] is not None
        else f"the plain loop's loss of {loss(found['effective_target'])} was not reached in time"
    )
    limit = (
        f"{rate(found['limit_batches_per_second'])} batches/s forward and backward alone; "
        f"ratio [bold]{ratio(found['limit_ratio'])}[/]"
    )
    cpu = (
        f"{micros(found['cpu_us_per_batch'])}, of it the nodes' forward and backward "
        f"{micros(found['cpu_us_per_batch_computing'])}, outside them "
        f"[bold]{micros(found['cpu_us_per_batch_outside'])}[/]"
    )
    losses = (
        f"first {loss(found['loss_first'])}, last {loss(found['loss_last'])}, "
        f"average {loss(found['loss_average'])}; "
        f"over all samples in the end [bold]{loss(found['loss_all_samples'])}[/]"
    )
    network = (
        f"{speed(found['bytes_per_second'])} in all, "
        f"{least_and_most((n['bytes_per_second'] for n in nodes), speed)} a node, "
        f"{size(found['bytes_per_batch'])} a batch"
    )
    network_time = least_and_most((n["seconds_network"] for n in nodes), seconds, spread=True)
    encoding_time = least_and_most((n["seconds_codec"] for n in nodes), seconds, spread=True)
    shares = (
        f"{least_and_most(found['batches_per_node'].values(), count)}, "
        f"most/least [bold]{ratio(found['fairness'])}[/]"
    )
    staleness = f"mean {ratio(found['staleness_mean'])}, most {count(found['staleness_max'])} updates late"
    verdict = "[green]clean[/]" if found["audit_clean"] else "[red]NOT CLEAN[/]"
    facts(
        out,
        [
            ("batches applied", f"{count(found['batches'])} in {seconds(found['seconds'])}"),
            ("batches/s", speeds),
            ("effective", effective),
            ("limit", limit),
            ("CPU per batch", cpu),
            ("epochs", count(found["epochs"])),
            ("loss", losses),
            ("network", network),
            ("network time", f"{network_time} a node"),
            ("compression time", f"{encoding_time} a node, ratio {times(found['compression_ratio'])}"),
            ("memory (PSS)", f"{size(found['memory_pss_bytes'])}, all processes together"),
            ("batches per node", shares),
            ("staleness", staleness),
            ("lent again", f"{count(found['batches_relent'])} batches"),
            ("ledger", f"{count(found['ledger_batches'])} batches, {verdict}"),
        ],
    )
    for violation in found["audit_violations"]:
        out.print(f"  VIOLATION: {violation}", markup=False)


def show_evolution(out: Console, found: dict[str, Any]) -> None:
    out.print(f"[bold]bench evolution[/]  {found['nodes']} nodes, {seconds(found['seconds'])} each")
    out.print("  then: what the first system reported (computed, not applied); now: measured here (applied)")
    out.print("  ratio: of pickles where there are any, else of the numbers themselves")
    for study in dict.fromkeys(row["study"] for row in found["rows"]):
        chosen = [row for row in found["rows"] if row["study"] == study]
        headings = ["b/s then", "now", "net then", "now", "net time then", "now", "memory then", "now"]
        out.print(
            rows(
                [study, *headings, "ratio then", "now", "loss"],
                [_evolution_row(row) for row in chosen],
            )
        )
        for note in dict.fromkeys(row["note"] for row in chosen):
            stages = ", ".join(row["stage"] for row in chosen if row["note"] == note)
            out.print(f"  [dim]{stages}: {note}[/]")


def _evolution_row(row: dict[str, Any]) -> list[str]:
    then = row["then"]
    return [
        row["stage"],
        rate(then["batches_per_second"]),
        rate(row["batches_per_second"]),
        speed(then["bytes_per_second"]),
        speed(row["bytes_per_second"]),
        least_and_most(then["seconds_network"] or (), seconds),
        least_and_most(row["seconds_network"] or (), seconds),
        size(then["memory_bytes"]),
        size(row["memory_pss_bytes"]),
        times(then["compression_ratio"]),
        times(row["compression_ratio_of_pickles"] or row["compression_ratio"]),
        loss(row["loss_all_samples"]),
    ]


def show_codecs(out: Console, found: dict[str, Any]) -> None:
    memcpy = found["memcpy_bytes_per_second"]
    out.print(f"[bold]bench codecs[/]  a bare copy: {speed(memcpy)}")
    out.print(
        rows(
            ["codec", "data", "raw", "encoded", "ratio", "encode", "decode"],
            [
                [
                    row["codec"],
                    row["data"],
                    size(row["raw_bytes"]),
                    size(row["encoded_bytes"]),
                    times(row["ratio"]),
                    speed(row["encode_bytes_per_second"]),
                    speed(row["decode_bytes_per_second"]),
                ]
                for row in found["rows"]
            ],
            words=2,
        )
    )


def show_exchange(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench exchange[/]  {found['optimizer']}, checkpoints {found['checkpoint_every']}; "
        f"one stream: TCP {speed(found['tcp_bytes_per_second'])}, "
        f"Unix {speed(found['unix_bytes_per_second'])}; a copy: {speed(found['memcpy_bytes_per_second'])}"
    )
    out.print(
        rows(
            [
                "parameters",
                "nodes",
                "road",
                "exchanges/s",
                "limit",
                "ratio",
                "gloo",
                "ratio",
                "memory",
                "ratio",
            ],
            [
                [
                    count(row["parameters"]),
                    count(row["nodes"]),
                    row["road"],
                    rate(row["exchanges_per_second"]),
                    rate(row["limit_exchanges_per_second"]),
                    ratio(row["limit_ratio"]),
                    rate(row["gloo_exchanges_per_second"]),
                    ratio(row["gloo_ratio"]),
                    size(row["coordinator_memory_bytes"]),
                    times(row["coordinator_memory_ratio"]),
                ]
                for row in found["rows"]
            ],
            words=3,
        )
    )
    out.print("  memory: what the coordinator grew by, over parameters, optimizer state and one accumulator")


def show_links(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench links[/]  {count(found['parameters'])} parameters, {found['nodes']} nodes, "
        f"{seconds(found['seconds'])} each, the better of {found['rounds']} turns; batches/s"
    )
    links = found["rows"]
    every = list(links[0]["batches_per_second"])

    def lines(codecs: Iterable[str]) -> list[list[str]]:
        return [[codec, *(rate(link["batches_per_second"][codec]) for link in links)] for codec in codecs]

    def over(name: str, key: str) -> list[str]:
        return [f"[dim]{name}[/]", *(ratio(link[key]) for link in links)]

    lossy = []
    if found["lossy"]:
        blank = [""] * (1 + len(links))
        verdict = over("auto:lossy over the best of all", "auto_lossy_over_best")
        lossy = [blank, *lines(found["lossy"]), verdict]
    out.print(
        rows(
            ["codec", *(f"{link['mbit_per_second']:g} Mbit/s" for link in links)],
            [
                *lines(codec for codec in every if codec not in found["lossy"]),
                over("auto over the best of these", "auto_over_best"),
                over("auto over none", "auto_over_raw"),
                *lossy,
            ],
        )
    )


def show_peers(out: Console, found: dict[str, Any]) -> None:
    kept = found["pairs"] - found["pairs_dropped"]
    out.print(f"[bold]bench peers[/]  {kept} pairs of {seconds(found['seconds'])}, in turns")
    out.print(
        rows(
            [
                "row",
                "peer",
                "verdict",
                "nodes",
                "w5xde b/s",
                "peer b/s",
                "ratio",
                "95 %",
                "loss",
                "peer loss",
            ],
            [_peers_row(row) for row in found["rows"]],
            words=3,
        )
    )


def _peers_row(row: dict[str, Any]) -> list[str]:
    if row["status"] != "measured":
        return [row["title"], row["peer"], row["status"], count(row["nodes"]), *[UNKNOWN] * 6]
    return [
        row["title"],
        row["peer"],
        row["verdict"],
        count(row["nodes"]),
        rate(row["batches_per_second"]),
        rate(row["peer_batches_per_second"]),
        ratio(row["ratio"]),
        f"{ratio(row['low'])} – {ratio(row['high'])}",
        loss(row["loss_all_samples"]),
        loss(row["peer_loss_all_samples"]),
    ]


def show_costs(out: Console, found: dict[str, Any]) -> None:
    kept = found["pairs"] - found["pairs_dropped"]
    out.print(
        f"[bold]bench costs[/]  {found['nodes']} nodes; encryption in {kept} pairs of runs of "
        f"{seconds(found['seconds'])}, checks in turns of {seconds(found['turn_seconds'])} within runs"
    )
    out.print(
        rows(
            [
                "row",
                "compared with",
                "verdict",
                "turns",
                "b/s with",
                "without",
                "cost",
                "95 %",
                "asked",
                "CPU",
            ],
            [
                [
                    row["title"],
                    row["without"],
                    row["verdict"],
                    count(len(row["ratios"])),
                    rate(row["batches_per_second_with"]),
                    rate(row["batches_per_second_without"]),
                    percent(row["cost"]),
                    f"{percent(row['cost_low'])} – {percent(row['cost_high'])}",
                    percent(row["asked"]),
                    percent(row["coordinator_cpu_part"]),
                ]
                for row in found["rows"]
            ],
            words=3,
        )
    )
    out.print("  cost: of batches/s; CPU: what the checks take of the coordinator's time, counted by samples")


def show_scale(out: Console, found: dict[str, Any]) -> None:
    out.print(
        f"[bold]bench scale[/]  {seconds(found['seconds'])} each; light nodes replay captured gradients"
    )
    out.print(
        rows(
            [
                "nodes",
                "updates/s",
                "to first",
                "CPU",
                "p50",
                "p99",
                "memory each",
                "joined in",
                "refused",
                "lost",
            ],
            [
                [
                    count(row["nodes"]),
                    rate(row["updates_per_second"]),
                    ratio(row["ratio_to_first"]),
                    micros(row["cpu_us_per_update"]),
                    seconds(row["latency_p50_seconds"]),
                    seconds(row["latency_p99_seconds"]),
                    size(row["memory_per_connection_bytes"]),
                    seconds(row["join_seconds"]),
                    count(row["updates_refused"]),
                    count(row["connections_lost"]),
                ]
                for row in found["rows"]
            ],
        )
    )


_SHOW: dict[str, Callable[[Console, dict[str, Any]], None]] = {
    "learn": learning.show_learn,
    "sizes": learning.show_sizes,
    "seed": show_seed,
    "evolution": show_evolution,
    "codecs": show_codecs,
    "exchange": show_exchange,
    "links": show_links,
    "rig": slow_links.show_rig,
    "utilisation": slow_links.show_utilisation,
    "peers": show_peers,
    "engines": engine_runs.show_engines,
    "costs": show_costs,
    "scale": show_scale,
}
