"""Data as people have it gives the model of a plain loop over a real DataLoader, whoever helps.

The plain loop here iterates torch's own DataLoader. Of w5xde it knows the seed of a batch and of an order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, Subset, WeightedRandomSampler

from tests.learn import jobs, ragged
from tests.learn.jobs import make, mlp, settings
from tests.learn.pool import Trained, train_in_pool
from tests.learn.reference import Parameters, differences, initial, seed_all
from w5xde import Job
from w5xde.config import Settings
from w5xde.tree import batch_seed

NODE_COUNTS = (1, 2, 7)
ORDER = -1
# No flag says anything of batches: the DataLoader does.
LOADED: dict[str, Any] = {"batch_size": None}


def seeded(epoch: int, seed: int = 3) -> torch.Generator:
    """The generator with which an order is drawn."""
    return torch.Generator().manual_seed(batch_seed(seed, epoch, ORDER))


def train_with(
    job: Job,
    how: Settings,
    batches_of: Callable[[int], Iterable[Any]],
    loss_sum: Callable[[nn.Module, Any], Tensor],
    weigh: Callable[[Any], Any],
) -> nn.Module:
    """A plain loop: a step is the sum of the losses of its batches, divided by all that they weigh."""
    model = initial(job, how)
    optimizer = job.optimizer(Parameters(model))
    for epoch in range(how.epochs or 1):
        numbered = enumerate(batches_of(epoch))
        while step := list(islice(numbered, how.step_batches)):
            weight = sum(float(weigh(batch)) for _, batch in step)
            for number, batch in step:
                seed_all(batch_seed(how.seed, epoch, number))
                (loss_sum(model, batch) / weight).backward()
            if how.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return model


def check(job: Job, how: Settings, plain: nn.Module, within: float = 1e-6) -> Trained:
    """The same bits for 1, 2 and 7 nodes, and the plain loop's model."""
    runs = [train_in_pool(job, how, nodes=nodes, seed=nodes) for nodes in NODE_COUNTS]
    assert len({run.sha256 for run in runs}) == 1
    assert max(differences(runs[0].module, initial(job, how)).values()) > 1e-3
    found = differences(runs[0].module, plain)
    assert max(found.values()) < within, found
    return runs[0]


def mean_of_samples(model: nn.Module, batch: Any) -> Tensor:
    return jobs.classify(model, batch) * len(batch[0])


def samples_in(batch: Any) -> int:
    return len(batch[0])


# --- DataLoaders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["stream", "local"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_weighted_sampler_in_a_data_loader(drop_last: bool, data: str) -> None:
    weights = torch.arange(1.0, 1.0 + jobs.SAMPLES)

    def loader(generator: torch.Generator | None = None) -> DataLoader[Any]:
        sampler = WeightedRandomSampler(weights.tolist(), 61, generator=generator)
        return DataLoader(jobs.points(), batch_size=6, sampler=sampler, drop_last=drop_last)

    job = make(mlp(lambda: nn.Dropout(0.1)), data=loader)
    how = settings(**LOADED, data=data)
    plain = train_with(job, how, lambda epoch: loader(seeded(epoch)), mean_of_samples, samples_in)
    check(job, how, plain)


def test_a_shuffled_data_loader_gives_the_bits_of_its_data_set() -> None:
    """Whatever order its own generator would draw: an epoch is every sample once, in the run's order."""
    loader = make(mlp(), data=lambda: DataLoader(jobs.points(), batch_size=4, shuffle=True, num_workers=1))
    by_loader = train_in_pool(loader, settings(**LOADED), nodes=2, seed=1)
    assert by_loader.sha256 == train_in_pool(make(mlp()), settings(), nodes=2, seed=1).sha256
    ordered = make(mlp(), data=lambda: DataLoader(jobs.points(), batch_size=4))
    plain = train_with(ordered, settings(), lambda epoch: ordered.data(), mean_of_samples, samples_in)
    check(ordered, settings(**LOADED), plain)


def test_a_batch_sampler_makes_batches_of_unlike_sizes() -> None:
    class Uneven(Sampler[list[int]]):
        """Batches of 1 to 7 samples; in later epochs fewer of them."""

        def __init__(self) -> None:
            self.epoch = 0
            self.generator: torch.Generator | None = None

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[list[int]]:
            left = torch.randperm(jobs.SAMPLES - 9 * self.epoch, generator=self.generator).tolist()
            while left:
                size = 1 + len(left) % 7
                yield left[:size]
                left = left[size:]

    def batches_of(epoch: int) -> DataLoader[Any]:
        sampler = Uneven()
        sampler.set_epoch(epoch)
        sampler.generator = seeded(epoch)
        return DataLoader(jobs.points(), batch_sampler=sampler)

    job = make(mlp(), data=lambda: DataLoader(jobs.points(), batch_sampler=Uneven()))
    how = settings(**LOADED, epochs=3)
    plain = train_with(job, how, batches_of, mean_of_samples, samples_in)
    check(job, how, plain)


def test_a_data_set_that_makes_its_own_batches() -> None:
    """Each item counts as one sample, however many rows it has."""
    points = jobs.points()
    whole = [points[5 * i : 5 * i + 5 - i % 3] for i in range(10)]
    job = make(mlp(), data=lambda: DataLoader(whole, batch_size=None))  # type: ignore[arg-type]
    how = settings(**LOADED)
    plain = train_with(job, how, lambda epoch: whole, jobs.classify, lambda batch: 1)
    check(job, how, plain)


class Drifting(Dataset[Any]):
    """Samples that depend on the epoch, which a plain loop tells it."""

    def __init__(self) -> None:
        self._points = jobs.points()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        numbers, label = self._points[index]
        return numbers + self.epoch, label


@pytest.mark.parametrize("data", ["stream", "local"])
def test_data_sets_and_samplers_are_told_the_epoch(data: str) -> None:
    class Rotating(Sampler[int]):
        def __init__(self) -> None:
            self.epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return jobs.SAMPLES

        def __iter__(self) -> Iterator[int]:
            return iter([(7 * i + self.epoch) % jobs.SAMPLES for i in range(jobs.SAMPLES)])

    def batches_of(epoch: int) -> DataLoader[Any]:
        dataset, sampler = Drifting(), Rotating()
        dataset.set_epoch(epoch)
        sampler.set_epoch(epoch)
        return DataLoader(dataset, batch_size=4, sampler=sampler)

    job = make(mlp(), data=lambda: Subset(Drifting(), range(jobs.SAMPLES)), sampler=Rotating())
    how = settings(epochs=3, data=data)
    check(job, how, train_with(job, how, batches_of, mean_of_samples, samples_in))


# --- text ---------------------------------------------------------------------------------------------


def text_job(**more: Any) -> Job:
    parts = {"data": ragged.Sentences, "loss": ragged.loss, "collate": ragged.collate}
    return make(ragged.Reader, **parts | more)


@pytest.mark.parametrize("data", ["stream", "local"])
@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.05}, {"mode": "async", "batches_per_step": 5}])
def test_ragged_text_is_weighted_by_its_tokens(more: dict[str, Any], data: str) -> None:
    """A step is the mean over all its tokens, although batches have unlike numbers of them, and one none."""
    sentences = ragged.Sentences()

    def order(dataset: Any, epoch: int, seed: int) -> list[int]:
        """Shuffled, but for four sentences of which nothing is to be learned: they make a batch."""
        nothing = [0, 8, 16, 24]
        mixed = [i for i in range(len(dataset)) if i not in nothing]
        random.Random(seed).shuffle(mixed)
        return mixed[:8] + nothing + mixed[8:]

    def batches_of(epoch: int) -> DataLoader[Any]:
        drawn = order(sentences, epoch, batch_seed(3, epoch, ORDER))
        return DataLoader(sentences, batch_size=4, sampler=drawn, collate_fn=ragged.collate)

    assert int(ragged.tokens(list(batches_of(0))[2])) == 0
    job = text_job(sampler=order, weight=ragged.tokens)
    how = settings(data=data, **more)
    plain = train_with(job, how, batches_of, ragged.loss_sum, ragged.tokens)
    trained = check(job, how, plain)
    # The loss of a step is that mean, too.
    first, model, total = list(islice(batches_of(0), 5)), initial(job, how), 0.0
    for number, batch in enumerate(first):
        seed_all(batch_seed(3, 0, number))
        total += float(ragged.loss_sum(model, batch).detach())
    words = sum(int(ragged.tokens(batch)) for batch in first)
    assert trained.losses[0] == pytest.approx(total / words, rel=1e-5)


def test_bucketing_by_length_with_batches_of_a_function() -> None:
    sentences = ragged.Sentences()

    def buckets(dataset: Any, epoch: int, seed: int) -> list[list[int]]:
        """Sentences of about one length together, at most 40 words a batch."""
        chance = random.Random(seed)
        numbers = sorted(range(len(dataset)), key=lambda i: (len(dataset[i]), chance.random()))
        batches: list[list[int]] = [[]]
        for i in numbers:
            if batches[-1] and len(dataset[i]) * (len(batches[-1]) + 1) > 40:
                batches.append([])
            batches[-1].append(i)
        chance.shuffle(batches)
        return batches

    def batches_of(epoch: int) -> DataLoader[Any]:
        drawn = buckets(sentences, epoch, batch_seed(3, epoch, ORDER))
        return DataLoader(sentences, batch_sampler=drawn, collate_fn=ragged.collate)

    job = text_job(sampler=buckets, weight=ragged.tokens)
    how = settings(**LOADED)
    check(job, how, train_with(job, how, batches_of, ragged.loss_sum, ragged.tokens))


def test_a_weight_that_is_the_number_of_samples_changes_nothing_but_rounding() -> None:
    plain = train_in_pool(make(mlp(lambda: nn.BatchNorm1d(16))), settings(), nodes=1, seed=1)
    weighed = make(mlp(lambda: nn.BatchNorm1d(16)), weight=lambda batch: len(batch[0]))
    found = train_in_pool(weighed, settings(), nodes=1, seed=1)
    assert max(differences(found.module, plain.module).values()) < 1e-6


def test_with_one_batch_a_step_a_weight_changes_no_bit() -> None:
    """Every step of an async run has one batch: its mean is its own, whatever it weighs."""
    how = settings(mode="async", batches_per_step=1)
    plain = train_in_pool(make(mlp()), how, nodes=1, seed=1)
    weighed = train_in_pool(make(mlp(), weight=lambda batch: 0.1 + batch[0].sum() ** 2), how, nodes=1, seed=1)
    assert weighed.sha256 == plain.sha256
    assert weighed.losses == pytest.approx(plain.losses)


def test_a_step_in_which_nothing_weighs_anything_moves_no_parameter() -> None:
    job = make(mlp(lambda: nn.BatchNorm1d(16)), weight=lambda batch: 0.0)
    trained = train_in_pool(job, settings(), nodes=2, seed=1)
    moved = differences(trained.module, initial(job, settings()))
    assert {name for name, distance in moved.items() if distance} == {
        "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    assert set(trained.losses) == {0.0}


def test_random_samples_with_replacement() -> None:
    def loader(generator: torch.Generator | None = None) -> DataLoader[Any]:
        sampler = RandomSampler(jobs.points(), replacement=True, num_samples=33, generator=generator)
        return DataLoader(jobs.points(), batch_size=4, sampler=sampler)

    job = make(mlp(), data=loader)
    how = settings(**LOADED)
    check(job, how, train_with(job, how, lambda epoch: loader(seeded(epoch)), mean_of_samples, samples_in))
