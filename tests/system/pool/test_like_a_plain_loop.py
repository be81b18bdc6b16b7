"""A script with a pool trains what it trains without one, and its nodes leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import w5xde
from tests.learn.reference import differences
from tests.system.pool.nodes import kill_a_node
from tests.system.pool.plain import PlainPool
from tests.system.pool.scripts import SCRIPTS, STEPS, Script, accumulating, classify, gan
from w5xde.learn.model.digest import weights_sha256


def with_pool(script: Script, **settings: Any) -> nn.Module:
    model = script.model()
    with w5xde.Pool(model, losses=script.losses, seed=4, **settings) as pool:
        script.train(pool, model)
    return model


def without(script: Script) -> nn.Module:
    model = script.model()
    script.train(PlainPool(model, script.losses, seed=4), model)
    return model


def require_equal(found: nn.Module, plain: nn.Module) -> None:
    assert {name: value for name, value in differences(found, plain).items() if value > 1e-6} == {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_the_model_that_a_plain_loop_trains(name: str) -> None:
    script = SCRIPTS[name]
    plain = without(script)
    assert max(differences(plain, script.model()).values()) > 0.05, "nothing was trained: nothing is shown"
    found = with_pool(script, nodes=2)
    require_equal(found, plain)
    assert weights_sha256(with_pool(script, nodes=1)) == weights_sha256(found)


class Killing:
    """A pool one of whose nodes is killed before some calls, and once during a call."""

    def __init__(self, pool: w5xde.Pool) -> None:
        self._pool = pool
        self.calls = self.killed = 0

    def backward(self, *batch: Any, **how: Any) -> Tensor:
        self.calls += 1
        if self.calls % 7 == 3:
            self.killed += kill_a_node()
        return self._pool.backward(*batch, **how)


def test_one_two_and_seven_nodes_give_the_same_bits_also_if_nodes_are_killed() -> None:
    undisturbed = weights_sha256(with_pool(gan, nodes=1))
    for nodes in (2, 7):
        model = gan.model()
        with w5xde.Pool(model, losses=gan.losses, seed=4, nodes=nodes, log="silent") as pool:
            killing = Killing(pool)
            gan.train(killing, model)
        assert killing.calls == 2 * STEPS
        assert killing.killed >= 2
        assert weights_sha256(model) == undisturbed


@pytest.mark.parametrize(
    "settings",
    [{"verify": 1.0}, {"recording": "off"}, {"road": "tcp"}, {"road": "unix", "compress": "zstd:1"}],
    ids=str,
)
def test_no_setting_of_nodes_changes_the_bits(settings: dict[str, Any]) -> None:
    usual = weights_sha256(with_pool(gan, nodes=2))
    assert weights_sha256(with_pool(gan, nodes=2, **settings)) == usual


def test_the_seed_decides_what_the_loss_draws() -> None:
    model, other = gan.model(), gan.model()
    for each, seed in ((model, 4), (other, 5)):
        with w5xde.Pool(each, losses=gan.losses, nodes=1, seed=seed) as pool:
            gan.train(pool, each)
    assert weights_sha256(model) != weights_sha256(other)


# --- models of every route: on the event loop, in shared memory, on a thread, viewed where they are ---------


@pytest.mark.parametrize("width", [8, 150, 600, 2400])
def test_models_of_every_size_take_their_own_way_to_the_same_result(width: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 3))

    def train(pool: Any, model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        generator = torch.Generator().manual_seed(2)
        for step in range(4):
            inputs = torch.randn(8, 6, generator=generator)
            labels = inputs.sum(1).remainder(3).floor().long()
            # The first layer is frozen for one call, and the gradient sink of large models must know.
            model[0].requires_grad_(step != 2)
            pool.backward((inputs, labels), parts=2)
            optimizer.step()
            optimizer.zero_grad()

    script = Script(build, {"loss": classify}, train)
    require_equal(with_pool(script, nodes=2), without(script))


# --- gradients, exactly as `backward` leaves them --------------------------------------------------------


def some_batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1).remainder(3).floor().long()


def test_gradients_are_added_and_those_that_a_loss_does_not_touch_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(2, 2), "also": nn.Linear(3, 3)})
    losses = {
        "short": lambda model, part: classify(model["used"], part),
        "long": lambda model, part: classify(nn.Sequential(model["used"], model["also"]), part),
    }
    with w5xde.Pool(model, losses=losses, nodes=1) as pool:
        first = pool.backward(some_batch(), "short", parts=2)
        assert first.shape == ()
        assert not first.requires_grad
        once = model["used"].weight.grad.clone()
        assert model["also"].weight.grad is model["unused"].weight.grad is None
        assert pool.backward(some_batch(), "short", parts=2) == first
        assert torch.equal(model["used"].weight.grad, once + once)
        model["unused"].weight.grad = torch.ones(2, 2)
        pool.backward(some_batch(), "long", parts=2)
        assert torch.equal(model["unused"].weight.grad, torch.ones(2, 2))
        assert model["also"].weight.grad is not None
        assert model["unused"].bias.grad is None
    # The caller's own loss and gradient, of the batch as a whole.
    copy = nn.Linear(6, 3)
    copy.load_state_dict(model["used"].state_dict())
    loss = classify(copy, some_batch())
    loss.backward()
    assert torch.allclose(first, loss.detach())
    assert torch.allclose(once, copy.weight.grad, atol=1e-7)


def test_a_model_goes_on_by_itself_when_its_pool_is_closed() -> None:
    model = accumulating.model()
    with w5xde.Pool(model, losses=accumulating.losses, nodes=1) as pool:
        pool.backward(some_batch(), parts=2)
    # Each tensor has memory of its own again, so that saving a part of the model saves no more than that.
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.state_dict().values())
    classify(model, some_batch()).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with w5xde.Pool(model, losses=accumulating.losses, nodes=1) as pool:
        assert pool.backward(some_batch(), parts=2) > 0


def make_closure(factor: float) -> Callable[[Any, Any], Tensor]:
    return lambda model, part: factor * classify(model, part)


def test_lambdas_and_closures_are_losses_because_local_nodes_are_forked() -> None:
    model = accumulating.model().eval()
    found = {}
    with w5xde.Pool(model, losses={"once": make_closure(1.0), "twice": make_closure(2.0)}, nodes=1) as pool:
        for name in ("once", "twice"):
            found[name] = pool.backward(some_batch(), name, parts=2)
    assert found["twice"] == pytest.approx(2 * found["once"])
