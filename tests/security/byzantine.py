"""`python -m tests.security.byzantine`: a pool of eight in which two lie, in every way, and what that does.

Real processes train the digits; two of them are honest for a while, then lie. Each row: how the loss over all
digits ends, against the same run without liars. Exit code 1 if a promise does not hold: no number that is not
finite, no honest node turned out, and with --verify 0.1 --robust trim:2 a loss within 5 % of the clean one.
`--honest 10000` verifies so many batches of pools without liars, of several kinds of model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import w5xde
from tests.learn.verified import HONEST, blamed
from tests.processes import events
from tests.system.liars import LIES, Lies
from w5xde.callbacks.status import RunStatus
from w5xde.datasets import digits

NODES, LIARS = 8, 2
# Beyond the ten leases of a newcomer that are all verified.
HONEST_BATCHES = 20
LOSS_MARGIN = 0.05
# A robust mean needs a step that five nodes or more can share.
STEP_BATCHES = 8
PLAIN: dict[str, Any] = {}
TRIMMED: dict[str, Any] = {"robust": "trim:2"}
BOTH: dict[str, Any] = {"robust": "trim:2", "verify": 0.1}
GUARDS = {"neither": PLAIN, "trim:2": TRIMMED, "both": BOTH}


@dataclass(frozen=True)
class Ending:
    """What came of a run."""

    loss: float
    is_finite: bool
    liars_out: int
    honest_out: int
    summary: dict[str, Any]


class _Processes(w5xde.Callback):
    """Which node is which process."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    def on_step(self, run: RunStatus, step: int, loss: float) -> None:
        self.pids |= {node.name: node.pid for node in run.nodes if node.pid is not None}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def loss(net: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(net(batch[0]), batch[1])


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.003)


def train(lie: str = "", honest_batches: int = HONEST_BATCHES, **settings: Any) -> Ending:
    """A run with two liars, or without; the loss is what its weights come to, whatever the nodes said."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        lies = (
            Lies(folder, lie, loss, nodes=NODES, liars=LIARS, honest_batches=honest_batches) if lie else None
        )
        job = w5xde.Job(model=model, data=digits, loss=lies or loss, optimizer=optimizer)
        processes = _Processes()
        # What lies is no function of model and batch: it must not be recorded.
        fixed = {"runs": str(folder / "runs"), "name": "run", "nodes": NODES, "recording": "off"}
        step = {"batches_per_step": STEP_BATCHES}
        result = w5xde.train(job, callbacks=[processes], log="silent", **fixed, **step, **settings)
        told = events(folder / "runs" / "run")
        liars = lies.liars() if lies is not None else set()
        gone = {record["node"] for record in told if record["kind"] == "cheat"}
        gone |= {r["node"] for r in told if r["kind"] == "left" and "updates were bad" in r["reason"]}
        # One may be gone before anybody knew its process: so those are counted who are not.
        liars_out = len(liars - {pid for node, pid in processes.pids.items() if node not in gone})
        trained = result.model.eval()
        images, labels = digits("train").tensors
        with torch.no_grad():
            found = float(cross_entropy(trained(images), labels))
        is_finite = all(bool(tensor.isfinite().all()) for tensor in trained.state_dict().values())
        return Ending(found, is_finite, liars_out, len(gone) - liars_out, result.summary)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.byzantine")
    # Long enough that those who lie for a while before they are found out are a small part of it.
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2, help="so many runs of each kind")
    parser.add_argument("--guards", nargs="+", choices=GUARDS, default=list(GUARDS))
    parser.add_argument("--honest", type=int, help="instead: verify so many batches of honest nodes")
    given = parser.parse_args()
    failed = verify(given.honest) if given.honest else lie_in_every_way(given)
    print(f"promises not kept: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def verify(batches: int) -> list[str]:
    """Honest nodes alone, of every kind of model in turn: in real pools in which everything is verified, and
    in one process where they have other numbers of threads."""
    failed = []
    each = -(-batches // len(HONEST))
    for kind, make in HONEST.items():
        with tempfile.TemporaryDirectory() as runs:
            # 13 batches are an epoch of these jobs.
            settings = {"nodes": 4, "verify": 1.0, "batch_size": 4, "epochs": -(-each // 13)}
            result = w5xde.train(make(), runs=runs, name="run", log="silent", **settings)
            told = [record["text"] for record in events(Path(runs) / "run") if record["kind"] == "cheat"]
        done = result.summary["batches"]
        print(f"{kind}: {done:,} batches of a real pool verified, {len(told)} nodes turned out", flush=True)
        found = blamed(make(), each)
        print(f"{kind}: {each:,} batches on 1 to 3 threads verified, {len(found)} called wrong", flush=True)
        failed += [kind] if told or found else []
    return failed


def lie_in_every_way(given: argparse.Namespace) -> list[str]:
    failed = []
    clean: dict[tuple[str, int], float] = {}
    print("| lie | guard | loss (mean) | to clean, each seed | liars out | honest out | finite | degraded |")
    print("|---|---|---|---|---|---|---|---|")
    for lie in ("", *LIES):
        for way in given.guards:
            ends = [train(lie, epochs=given.epochs, seed=s, **GUARDS[way]) for s in range(given.seeds)]
            ratios = []
            for seed, end in enumerate(ends):
                ratios.append(end.loss / clean.setdefault((way, seed), end.loss) - 1)
            mean = sum(end.loss for end in ends) / len(ends)
            out, honest = sum(end.liars_out for end in ends), sum(end.honest_out for end in ends)
            is_finite = all(end.is_finite for end in ends)
            shown = " ".join(f"{ratio:+.1%}" for ratio in ratios) if lie else "clean"
            liars = f"{out} of {LIARS * len(ends)}" if lie else ""
            short = sum(end.summary["degraded_steps"] for end in ends)
            kept = f"{honest} | {'yes' if is_finite else 'NO'} | {short}"
            print(f"| {lie or 'none'} | {way} | {mean:.4f} | {shown} | {liars} | {kept} |", flush=True)
            is_kept = way != "both" or max(ratios) <= LOSS_MARGIN
            if not (is_kept and is_finite) or honest:
                failed.append(f"{lie or 'clean'} ({way})")
    return failed


if __name__ == "__main__":
    sys.exit(main())
