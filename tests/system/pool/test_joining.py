"""Other machines join a pool by its ticket, with the file that makes it; other files are refused."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import w5xde
from tests.learn.reference import differences
from tests.processes import HERE, JOBS, forked, run_python, wait_until
from tests.system.pool import own_loop
from tests.system.pool.plain import PlainPool
from w5xde.cli.main import main
from w5xde.runtime.calls import service
from w5xde.ticket import Ticket, parse

FILE = str(Path(own_loop.__file__))


def fresh_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3))


def keys() -> set[Path]:
    """The keys of runs that this user has."""
    return set(Path(os.environ["W5XDE_STATE"]).glob("runs/*.pem"))


def here(pool: w5xde.Pool) -> Ticket:
    """The ticket of a pool that listens everywhere, as this machine uses it."""
    ticket = parse(str(pool.ticket))
    return replace(ticket, addresses=((HERE, ticket.addresses[0][1]),))


def test_a_node_joins_by_ticket_over_tls_and_computes_what_a_plain_loop_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WORD_SECONDS", 0.1)
    model, plain, before = fresh_model(), fresh_model(), keys()
    own_loop.train(PlainPool(plain, {"loss": own_loop.loss}), 5)
    pool = w5xde.Pool(model, losses={"loss": own_loop.loss}, serve="0.0.0.0:0")
    found: list[BaseException | None] = []

    def train() -> None:
        try:
            own_loop.train(pool, 5)
            found.append(None)
        except BaseException as error:
            found.append(error)

    with pool:
        assert pool.ticket is None
        training = threading.Thread(target=train)
        training.start()
        wait_until(lambda: pool.ticket is not None or bool(found), lambda: "the pool does not listen")
        said: list[str] = []

        def is_said() -> bool:
            said.append(capfd.readouterr().err)
            return "no node is there" in "".join(said)

        # A call waits for a node, and says so.
        wait_until(is_said, lambda: "".join(said))
        assert "to join:  w5xde join w5" in "".join(said)
        ticket = here(pool)
        assert not ticket.is_clear
        assert ticket.fingerprint
        with forked(functools.partial(w5xde.join, ticket, FILE, node_name="guest", log="silent")) as guest:
            training.join(60)
            assert found == [None], guest.text
            assert pool.nodes == ["guest"]
            assert keys() != before
            pool.close()
            assert guest.wait() == 0
    # The key of a pool is of no use when that has ended.
    assert keys() == before
    assert {key: value for key, value in differences(model, plain).items() if value > 1e-6} == {}


def test_a_whole_script_serves_and_a_command_joins_it(tmp_path: Path) -> None:
    """As two machines would: `python own_loop.py`, and `w5xde join TICKET own_loop.py`."""
    ticket = tmp_path / "ticket"

    def script() -> None:
        done = run_python(FILE, str(ticket), "3", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        print("the script ended")

    with forked(script) as running:
        wait_until(lambda: ticket.exists() and bool(ticket.read_text()), lambda: running.text)
        # It may be over before the node is there: then nobody answers any more.
        assert main(["join", f"@{ticket}", FILE, "--log", "silent"]) in (0, 10)
        running.wait_for("the script ended")


def joined(pool: w5xde.Pool, job: Any) -> w5xde.W5xdeError:
    """The error with which a node that joins with this job is refused."""
    with pytest.raises(w5xde.W5xdeError) as refused:
        w5xde.join(here(pool), job, log="silent")
    return refused.value


def test_a_node_with_another_file_is_refused(tmp_path: Path) -> None:
    model = fresh_model()
    with w5xde.Pool(model, losses={"loss": own_loop.loss}, serve="0.0.0.0:0", nodes=1, log="silent") as pool:
        own_loop.train(pool, 1)
        error = joined(pool, f"{JOBS}:job")
        assert error.code == "W5-275"
        assert "a pool with the losses loss, and your file has a job" in error.what
        other = w5xde.Pool(model, losses={"other": own_loop.loss})
        assert joined(pool, other.job).code == "W5-275"
        larger = w5xde.Pool(nn.Linear(6, 3), losses={"loss": own_loop.loss})
        assert joined(pool, larger.job).code == "W5-201"
        # Model and names are right, and the loss is another function: the canary tells.
        wrong = w5xde.Pool(fresh_model(), losses={"loss": lambda model, part: 3 * own_loop.loss(model, part)})
        assert joined(pool, wrong.job).code == "W5-212"
        error = joined(pool, None)
        assert (error.code, "pools never send code" in error.what) == ("W5-286", True)
        own_loop.train(pool, 1)


def test_a_pool_is_no_job_for_train(tmp_path: Path) -> None:
    with pytest.raises(w5xde.JobError) as refused:
        w5xde.train(FILE, nodes=0, runs=str(tmp_path))
    assert refused.value.code == "W5-270"
    assert "run the file with python" in refused.value.fix


def test_a_file_that_begins_its_loop_when_it_is_loaded_is_refused(tmp_path: Path) -> None:
    text = Path(FILE).read_text().replace('if __name__ == "__main__":', "if True:")
    file = tmp_path / "unguarded.py"
    file.write_text(text)
    with pytest.raises(w5xde.JobError) as refused:
        w5xde.train(str(file))
    assert refused.value.code == "W5-242"
    assert "__main__" in refused.value.fix
