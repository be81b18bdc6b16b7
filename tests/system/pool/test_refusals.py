"""What a pool refuses, before anything is computed, and with which advice."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import w5xde
from tests.system.pool.scripts import classify


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1).remainder(3).floor().long()


@pytest.fixture(name="pool")
def open_pool() -> Iterator[w5xde.Pool]:
    with w5xde.Pool(small_model(), losses={"a": classify, "b": classify}, nodes=1) as pool:
        yield pool


def code_of(work: Callable[[], object]) -> str:
    with pytest.raises(w5xde.W5xdeError) as refused:
        work()
    assert refused.value.fix or "Did you mean" in refused.value.what
    return refused.value.code


@pytest.mark.parametrize(
    "losses", [{}, None, classify, {"": classify}, {3: classify}, {"a": 1}, {"a" * 65: classify}]
)
def test_losses_are_functions_with_names(losses: Any) -> None:
    assert code_of(lambda: w5xde.Pool(small_model(), losses=losses)) == "W5-270"


def test_a_call_names_a_loss_that_there_is(pool: w5xde.Pool) -> None:
    assert code_of(lambda: pool.backward(batch(), parts=2)) == "W5-270"
    assert code_of(lambda: pool.backward(batch(), "c", parts=2)) == "W5-270"


def test_a_batch_is_split_only_if_the_caller_says_so(pool: w5xde.Pool) -> None:
    assert code_of(lambda: pool.backward(list(batch()), "a")) == "W5-271"


def test_what_cannot_be_sent_is_named(pool: w5xde.Pool) -> None:
    assert code_of(lambda: pool.backward([{"x": batch()[0], "what": object()}], "a")) == "W5-203"
    pool.backward(batch(), "a", parts=2)
    with pytest.raises(w5xde.JobError, match=r"the batch\['what'\] holds a object"):
        pool.backward([{"x": batch()[0], "what": object()}], "a")
    pool.backward(batch(), "a", parts=2)


def test_a_model_is_a_module() -> None:
    assert code_of(lambda: w5xde.Pool(small_model, losses={"a": classify})) == "W5-272"  # type: ignore[arg-type]


def with_a_hook() -> nn.Module:
    model = small_model()
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


def elsewhere() -> nn.Module:
    return small_model().to("meta")


def not_to_be_copied() -> nn.Module:
    model = small_model()
    model.kept = model(batch()[0])  # the result of arithmetic
    return model


@pytest.mark.parametrize("build", [with_a_hook, elsewhere, not_to_be_copied])
def test_a_model_that_nodes_could_not_compute_as_here_is_refused(build: Callable[[], nn.Module]) -> None:
    with w5xde.Pool(build(), losses={"a": classify}, nodes=0) as pool:
        assert code_of(lambda: pool.backward(batch(), parts=2)) == "W5-272"


def test_an_autocast_around_the_call_is_refused(pool: w5xde.Pool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert code_of(lambda: pool.backward(batch(), "a", parts=2)) == "W5-274"


def test_a_pool_is_entered_once_and_used_while_it_is_open(pool: w5xde.Pool) -> None:
    assert code_of(pool.__enter__) == "W5-277"
    closed = w5xde.Pool(small_model(), losses={"a": classify})
    assert code_of(lambda: closed.backward(batch(), parts=2)) == "W5-277"
    closed.close()


def test_a_pool_belongs_to_the_process_that_opened_it(pool: w5xde.Pool) -> None:
    pool.backward(batch(), "a", parts=2)

    def use() -> None:
        assert code_of(lambda: pool.backward(batch(), "a", parts=2)) == "W5-277"
        pool.close()  # which does nothing here

    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    pool.backward(batch(), "a", parts=2)


weight = 1.0


def weighted(model: nn.Module, part: Any) -> Tensor:
    return weight * classify(model, part)


def test_a_loss_that_reads_a_variable_which_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(inner: float) -> None:
        def both(model: nn.Module, part: Any) -> Tensor:
            return inner * classify(model, part)

        with w5xde.Pool(small_model(), losses={"global": weighted, "inner": both}, nodes=1) as pool:
            for name in ("global", "inner"):
                pool.backward(batch(), name, parts=2)
            monkeypatch.setattr("tests.system.pool.test_refusals.weight", 2.0)
            inner = 3.0
            for name in ("global", "inner"):
                with pytest.raises(w5xde.JobError, match="when the pool was entered") as refused:
                    pool.backward(batch(), name, parts=2)
                assert refused.value.code == "W5-278"

    run(1.0)


@pytest.mark.parametrize("setting", [{"mode": "async"}, {"batch_size": 3}, {"epochs": 1}, {"nodez": 1}])
def test_settings_of_runs_are_no_settings_of_a_pool(setting: dict[str, Any]) -> None:
    pool = w5xde.Pool(small_model(), losses={"a": classify}, **setting)
    assert code_of(pool.__enter__) == "W5-210"


@pytest.mark.parametrize("serve", ["0.0.0.0:99999", "no such host.example"])
def test_an_address_that_cannot_be_listened_on_is_told(serve: str) -> None:
    def run() -> None:
        with w5xde.Pool(small_model(), losses={"a": classify}, serve=serve) as pool:
            pool.backward(batch(), parts=2)

    assert code_of(run) in ("W5-210", "W5-110")
