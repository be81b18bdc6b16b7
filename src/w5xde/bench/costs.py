"""`bench costs`: what encryption and the checks of updates take of the seeds' benchmark, with what was asked.

With and without, in turns. Encrypted runs use the product's own TLS 1.3 on loopback, so that no port is open
to other machines: with a certificate made for this, because only a user's own is used there.

Of the checks, the limit on norms can be switched off; whether numbers are finite is always looked at. That is
timed where it happens, and its part of the coordinator's CPU time is added: batches a second fall by so much
if a run waits for the coordinator alone, and by its part of all CPU time if it waits for the cores. The
interval reaches from the one to the other.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from w5xde.bench import jobs
from w5xde.bench.crew import warm_up
from w5xde.bench.meter import machine
from w5xde.bench.pairs import Measured, dropped, in_turns, median, run_of_ours
from w5xde.bench.seed import SYNC_STEP_BATCHES, Say
from w5xde.bench.stats import compare

HERE = "127.0.0.1"
CERTIFICATE_DAYS = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """One row: what it is that costs, in which mode, and the most it was asked to cost."""

    title: str
    mode: str
    with_it: str
    without: str
    asked: float
    batches_per_step: int
    # What the run without it sets; and both.
    settings_without: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    is_tls: bool = False
    times_checks: bool = False


def _tls(mode: str, batches_per_step: int) -> Cost:
    return Cost(
        f"TLS, {mode}",
        mode,
        "TLS 1.3, loopback TCP",
        "clear text, loopback TCP",
        asked=0.35,
        batches_per_step=batches_per_step,
        settings={"road": "tcp", "host": HERE},
        is_tls=True,
    )


def _checks(mode: str, batches_per_step: int) -> Cost:
    return Cost(
        f"checks of updates, {mode}",
        mode,
        "as they are",
        "no limit on norms",
        asked=0.05,
        batches_per_step=batches_per_step,
        settings_without={"max_update_norm": "off"},
        times_checks=True,
    )


COSTS: dict[str, Cost] = {
    "tls-sync": _tls("sync", SYNC_STEP_BATCHES),
    "tls-async": _tls("async", 1),
    "checks-sync": _checks("sync", SYNC_STEP_BATCHES),
    "checks-async": _checks("async", 1),
}


@dataclass(frozen=True, slots=True)
class CostsOptions:
    """What can be chosen."""

    rows: tuple[str, ...] = tuple(COSTS)
    pairs: int = 6
    seconds: float = 6.0
    nodes: int = 10


def run_costs(options: CostsOptions, say: Say) -> dict[str, Any]:
    """A row for each cost."""
    warm_up()
    with tempfile.TemporaryDirectory(prefix="w5xde-bench-") as folder:
        certificate = _certificate(Path(folder))
        rows = [_row(name, COSTS[name], options, certificate, say) for name in options.rows]
    return {
        "bench": "costs",
        "nodes": options.nodes,
        "pairs": options.pairs,
        "pairs_dropped": dropped(options.pairs),
        "seconds": options.seconds,
        "rows": rows,
        "audit_clean": all(row["audit_clean"] for row in rows),
        "machine": machine(),
    }


def _row(
    name: str, cost: Cost, options: CostsOptions, certificate: dict[str, str], say: Say
) -> dict[str, Any]:
    def run(**settings: Any) -> Measured:
        return run_of_ours(
            jobs.seed,
            options.nodes,
            options.seconds,
            name="w5xde.bench:costs",
            times_checks=cost.times_checks,
            mode=cost.mode,
            batches_per_step=cost.batches_per_step,
            **cost.settings | settings,
        )

    turns = in_turns(
        options.pairs,
        (cost.with_it, lambda: run(**certificate if cost.is_tls else {})),
        (cost.without, lambda: run(**cost.settings_without)),
        lambda text: say(f"{name}, {text}"),
    )
    found = compare(turns.ratios)
    finite_of_coordinator = finite_of_all = None
    low, middle, high = 1 - found.high, 1 - found.ratio, 1 - found.low
    if cost.times_checks:
        finite_of_coordinator = _part(turns.ones, "coordinator_cpu_seconds")
        finite_of_all = _part(turns.ones, "cpu_seconds")
        # What noise makes less than nothing does not pay for what is added.
        low, middle, high = (max(0.0, each) for each in (low, middle, high))
        low += finite_of_all
        middle += finite_of_coordinator
        high += finite_of_coordinator
    return {
        "row": name,
        "title": cost.title,
        "mode": cost.mode,
        "nodes": options.nodes,
        "batches_per_step": cost.batches_per_step,
        "with": cost.with_it,
        "without": cost.without,
        "asked": cost.asked,
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "ratios": found.ratios,
        "switched_cost": 1 - found.ratio,
        "finite_part_of_coordinator": finite_of_coordinator,
        "finite_part_of_all": finite_of_all,
        "cost": middle,
        "cost_low": low,
        "cost_high": high,
        "verdict": verdict(low, high, cost.asked),
        "batches_per_second_with": median(turns.ones, "batches_per_second"),
        "batches_per_second_without": median(turns.others, "batches_per_second"),
        "cpu_us_per_batch_with": median(turns.ones, "cpu_us_per_batch"),
        "cpu_us_per_batch_without": median(turns.others, "cpu_us_per_batch"),
        "runs_with": turns.ones,
        "runs_without": turns.others,
        "audit_clean": turns.audit_clean,
    }


def verdict(low: float, high: float, asked: float) -> str:
    """Kept or missed only if the whole interval says so."""
    return "kept" if high <= asked else "missed" if low > asked else "not sure"


def _part(runs: list[Measured], of: str) -> float:
    """What the looks took of the CPU time, of all runs together."""
    return float(sum(run["check_cpu_seconds"] for run in runs) / sum(run[of] for run in runs))


def _certificate(folder: Path) -> dict[str, str]:
    """Settings of a run that is encrypted on this machine: its certificate, which is its own authority."""
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
