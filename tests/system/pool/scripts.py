"""Scripts as people have them: each trains a model of its own with a pool, real or plain.

Each is made to show one thing that the loop of a run cannot do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

STEPS = 12


class Script(NamedTuple):
    """A model, its losses, and the loop that trains it by `pool.backward`."""

    model: Callable[[], nn.Module]
    losses: dict[str, Callable[[Any, Any], Tensor]]
    train: Callable[[Any, Any], None]


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return build()

    return model


# --- a GAN: two optimizers, BatchNorm and dropout, a discriminator that is frozen for the generator ---


def gan_model() -> nn.Module:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    return nn.ModuleDict({"g": generator, "d": discriminator})


def _judged(model: Any, images: Tensor, truth: float) -> Tensor:
    return binary_cross_entropy_with_logits(model["d"](images), torch.full((len(images), 1), truth))


def d_loss(model: Any, part: Any) -> Tensor:
    fakes = model["g"](part["noise"]).detach()
    return _judged(model, part["images"], 1.0) + _judged(model, fakes, 0.0)


def g_loss(model: Any, part: Any) -> Tensor:
    return _judged(model, model["g"](part["noise"]), 1.0)


def train_gan(pool: Any, model: Any) -> None:
    optimizer_d = torch.optim.Adam(model["d"].parameters(), 0.01, betas=(0.5, 0.9))
    optimizer_g = torch.optim.SGD(model["g"].parameters(), 0.1, momentum=0.5)
    torch.manual_seed(8)
    for _ in range(STEPS):
        # Drawn here, from the generator that the pool must leave alone.
        batch = {"images": torch.randn(22, 8) + 1, "noise": torch.randn(22, 4)}
        model["d"].requires_grad_(True)
        pool.backward(batch, "d", parts=5)
        optimizer_d.step()
        optimizer_d.zero_grad()
        model["d"].requires_grad_(False)
        pool.backward(batch, "g", parts=3)
        optimizer_g.step()
        optimizer_g.zero_grad()


gan = Script(seeded(gan_model), {"d": d_loss, "g": g_loss}, train_gan)

# --- accumulation, clipping, a schedule, gradients that are kept as zeros, and a phase of evaluation ---


def accumulating_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3))


def classify(model: Any, part: Any) -> Tensor:
    inputs, labels = part
    return cross_entropy(model(inputs), labels)


def train_accumulating(pool: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        if step == STEPS // 2:
            model.eval()  # statistics stand still from here on
        for _ in range(3):
            inputs = torch.randn(10, 6, generator=generator)
            # As torch's DataLoader gives it: a list of two tensors.
            pool.backward([inputs, inputs.sum(1).remainder(3).floor().long()], parts=4)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()


accumulating = Script(seeded(accumulating_model), {"loss": classify}, train_accumulating)

# --- REINFORCE: a part is a seed, and the episodes are played where it is computed ----------------


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))


def reinforce(model: Any, part: Any) -> Tensor:
    """Episodes of a walk to the origin, which draws from all three global generators."""
    losses = []
    for _ in range(part["episodes"]):
        place, logs, rewards = random.uniform(-2, 2), [], []
        for _ in range(5):
            choice = torch.distributions.Categorical(logits=model(torch.tensor([place, 1.0])))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            place += float(action) - 1 + float(np.random.normal(0, 0.1))  # noqa: NPY002
            rewards.append(-abs(place))
        losses.append(-torch.stack(logs).sum() * (sum(rewards) - part["baseline"]))
    return torch.stack(losses).mean()


def train_reinforce(pool: Any, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    baseline = -5.0
    for step in range(STEPS):
        counts = [3, 1, 2]
        # The baseline changes from step to step, so it travels with each part.
        parts = [{"episodes": n, "baseline": baseline - 0.1 * step} for n in counts]
        pool.backward(parts, "reinforce", samples=counts)
        optimizer.step()
        optimizer.zero_grad()


walking = Script(seeded(policy), {"reinforce": reinforce}, train_reinforce)

# --- a target network: frozen, and moved through `.data`, which torch does not count as a write ---


def critic_model() -> nn.Module:
    critic = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
    target = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
    target.load_state_dict(critic.state_dict())
    return nn.ModuleDict({"critic": critic, "target": target.requires_grad_(False)})


def bellman(model: Any, part: Any) -> Tensor:
    states, rewards, following = part
    with torch.no_grad():
        wanted = rewards + 0.9 * model["target"](following)
    return mse_loss(model["critic"](states), wanted)


def train_critic(pool: Any, model: Any) -> None:
    optimizer = torch.optim.Adam(model["critic"].parameters(), 0.02)
    generator = torch.Generator().manual_seed(6)
    for _ in range(STEPS):
        batch = tuple(torch.randn(9, n, generator=generator) for n in (5, 1, 5))
        pool.backward(batch, "bellman", parts=2)
        optimizer.step()
        optimizer.zero_grad()
        for slow, fast in zip(model["target"].parameters(), model["critic"].parameters(), strict=True):
            slow.data.mul_(0.8).add_(fast.data, alpha=0.2)


critic = Script(seeded(critic_model), {"bellman": bellman}, train_critic)

# --- weights that are clipped through `.data`, loaded, and parts of unlike sizes ------------------


def train_by_hand(pool: Any, model: Any) -> None:
    """No optimizer at all: weights move through `.data` alone, and a snapshot is loaded in the middle."""
    generator = torch.Generator().manual_seed(9)
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(STEPS):
        inputs = torch.randn(11, 6, generator=generator)
        labels = inputs.sum(1).remainder(3).floor().long()
        parts = [(inputs[:2], labels[:2]), (inputs[2:9], labels[2:9]), (inputs[9:], labels[9:])]
        pool.backward(parts, "loss")
        for parameter in model.parameters():
            parameter.data = (parameter.data - 0.3 * parameter.grad).clamp(-0.5, 0.5)
            parameter.grad = None
        if step == STEPS // 2:
            model.load_state_dict(first)


by_hand = Script(seeded(accumulating_model), {"loss": classify}, train_by_hand)

SCRIPTS = {
    "gan": gan,
    "accumulating": accumulating,
    "walking": walking,
    "critic": critic,
    "by hand": by_hand,
}
