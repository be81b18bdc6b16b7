"""`bench costs`: the cost of encryption, of the checks of updates, and of an own loop, beside what it may be.

Encrypted and clear runs take turns. The encrypted ones use the TLS 1.3 of the product on the loopback, so
that no port is open to other machines, with a certificate made for this benchmark.

The checks cannot be switched off, and cost less than runs differ by: within each run they are off for half a
second and on for the next (see `checks`). All of these train the seeds' job.

An own loop (`w5xde.Pool`) trains the text job with two nodes, in turns with `w5xde.train`.
"""

from __future__ import annotations

import datetime as dt
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.contestants.own_loop import run_own_loop
from w5xde.bench.measure.meter import machine
from w5xde.bench.measure.pairs import Measured, dropped, in_turns, run_of_ours
from w5xde.bench.measure.processes import warm_up
from w5xde.bench.measure.stats import compare
from w5xde.bench.progress import Say
from w5xde.bench.suites.checks import TURN_SECONDS
from w5xde.bench.suites.seed import SEED_STEP_BATCHES
from w5xde.errors import TrainingError

HERE = "127.0.0.1"
CERTIFICATE_DAYS = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """One row: the feature, the mode, and the highest cost that is allowed."""

    title: str
    without: str
    mode: str
    batches_per_step: int
    asked: float
    measure: Callable[[Cost, CostsOptions, Say], Compared]
    # None: as many as the options say.
    nodes: int | None = None


@dataclass(slots=True)
class Compared:
    """Batches a second in turns with and without the feature, and their runs."""

    with_it: list[float]
    without: list[float]
    runs: list[Measured]
    # The share of the coordinator's CPU time, if it was measured.
    cpu_part: float | None = None
    audit_clean: bool = True


@dataclass(frozen=True, slots=True)
class CostsOptions:
    """The options of the benchmark."""

    rows: tuple[str, ...]
    pairs: int = 6
    seconds: float = 6.0
    nodes: int = 10


def _run(cost: Cost, options: CostsOptions, seconds: float, **more: Any) -> Measured:
    name = "w5xde.bench:costs"
    more |= {"mode": cost.mode, "batches_per_step": cost.batches_per_step}
    return run_of_ours(jobs.seed, options.nodes, seconds, name=name, **more)


def _encryption(cost: Cost, options: CostsOptions, say: Say) -> Compared:
    road = {"road": "tcp", "host": HERE}
    with tempfile.TemporaryDirectory(prefix="w5xde-bench-") as folder:
        certificate = _certificate(Path(folder))
        turns = in_turns(
            options.pairs,
            ("TLS", lambda: _run(cost, options, options.seconds, **road, **certificate)),
            (cost.without, lambda: _run(cost, options, options.seconds, **road)),
            say,
        )
    return Compared(
        [run["batches_per_second"] for run in turns.ones],
        [run["batches_per_second"] for run in turns.others],
        turns.ones + turns.others,
        audit_clean=turns.audit_clean,
    )


def _checks(cost: Cost, options: CostsOptions, say: Say) -> Compared:
    found = Compared([], [], [])
    looking = spent = 0.0
    # As long as a pair of runs; at least two pairs of turns.
    seconds = max(2 * options.seconds, 4 * TURN_SECONDS)
    for number in range(options.pairs):
        say(f"run {number + 1} of {options.pairs}: with and without, every half second")
        run = _run(cost, options, seconds, checks_in_turns=True)
        found.runs.append(run)
        found.audit_clean &= run["audit_clean"]
        turns = run["checks"]
        pairs = list(zip(turns["looking"], turns["blind"], strict=False))
        found.with_it += [pair[0] for pair in pairs]
        found.without += [pair[1] for pair in pairs]
        looking += turns["look_cpu_seconds"]
        spent += turns["cpu_seconds"]
    if not found.with_it:
        raise TrainingError(
            f"no run of {seconds:g} s had two turns: its steps take longer",
            code="W5-320",
            fix="give more --seconds",
        )
    found.cpu_part = looking / spent
    return found


def _own_loop(cost: Cost, options: CostsOptions, say: Say) -> Compared:
    job, nodes, size, parts = (
        jobs.text,
        cost.nodes or options.nodes,
        jobs.TEXT_BATCH_SIZE,
        cost.batches_per_step,
    )
    how: dict[str, Any] = {"mode": cost.mode, "batch_size": size, "batches_per_step": parts}
    turns = in_turns(
        options.pairs,
        ("w5xde.Pool", lambda: run_own_loop(job, nodes, size, parts, options.seconds).summary()),
        ("w5xde.train", lambda: run_of_ours(job, nodes, options.seconds, name="w5xde.bench:costs", **how)),
        say,
    )
    return Compared(
        [run["batches_per_second"] for run in turns.ones],
        [run["batches_per_second"] for run in turns.others],
        turns.ones + turns.others,
        audit_clean=turns.audit_clean,
    )


COSTS: dict[str, Cost] = {
    "tls-sync": Cost("TLS, sync", "clear text", "sync", SEED_STEP_BATCHES, 0.35, _encryption),
    "tls-async": Cost("TLS, async", "clear text", "async", 1, 0.35, _encryption),
    "checks-sync": Cost("checks of updates, sync", "none", "sync", SEED_STEP_BATCHES, 0.05, _checks),
    "checks-async": Cost("checks of updates, async", "none", "async", 1, 0.05, _checks),
    "own-loop-2": Cost("own loop, 2 batches a step", "w5xde.train", "sync", 2, 0.1, _own_loop, nodes=2),
    "own-loop-8": Cost("own loop, 8 batches a step", "w5xde.train", "sync", 8, 0.1, _own_loop, nodes=2),
}


def run_costs(options: CostsOptions, say: Say) -> dict[str, Any]:
    """Measure a row for each feature."""
    warm_up()
    rows = [_row(name, COSTS[name], options, say) for name in options.rows]
    return {
        "bench": "costs",
        "nodes": options.nodes,
        "pairs": options.pairs,
        "pairs_dropped": dropped(options.pairs),
        "seconds": options.seconds,
        "turn_seconds": TURN_SECONDS,
        "rows": rows,
        "audit_clean": all(row["audit_clean"] for row in rows),
        "machine": machine(),
    }


def _row(name: str, cost: Cost, options: CostsOptions, say: Say) -> dict[str, Any]:
    compared = cost.measure(cost, options, lambda text: say(f"{name}, {text}"))
    pairs = zip(compared.with_it, compared.without, strict=True)
    found = compare([with_it / without for with_it, without in pairs if without])
    low, high = 1 - found.high, 1 - found.low
    return {
        "row": name,
        "title": cost.title,
        "without": cost.without,
        "mode": cost.mode,
        "nodes": cost.nodes or options.nodes,
        "batches_per_step": cost.batches_per_step,
        "asked": cost.asked,
        "cost": 1 - found.ratio,
        "cost_low": low,
        "cost_high": high,
        "verdict": verdict(low, high, cost.asked),
        "ratios": found.ratios,
        "batches_per_second_with": statistics.median(compared.with_it),
        "batches_per_second_without": statistics.median(compared.without),
        "with": compared.with_it,
        "without_it": compared.without,
        "coordinator_cpu_part": compared.cpu_part,
        "runs": compared.runs,
        "audit_clean": compared.audit_clean,
    }


def verdict(low: float, high: float, asked: float) -> str:
    """Kept or missed only if the whole confidence interval is on one side of the limit."""
    return "kept" if high <= asked else "missed" if low > asked else "not sure"


def _certificate(folder: Path) -> dict[str, str]:
    """Settings of a run that is encrypted on the loopback, with a self-signed certificate."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "w5xde bench costs")])
    now = dt.datetime.now(dt.UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HERE))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=CERTIFICATE_DAYS))
        .not_valid_after(now + dt.timedelta(days=CERTIFICATE_DAYS))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "certificate.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.touch(0o600)
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return {"tls_cert": str(cert_file), "tls_key": str(key_file), "tls_ca": str(cert_file)}
