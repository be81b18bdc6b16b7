"""A LightningModule as a job: the weights of Lightning's own loop, and the same bits whichever nodes help."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.frameworks import tiny_modules
from tests.frameworks.compare import check_same, settings_of, train_here
from tests.frameworks.tiny_modules import (
    SEED,
    Annealed,
    Images,
    Normed,
    Warmed,
    fit,
    seeded,
    trainer_arguments,
)
from w5xde import Job, from_lightning
from w5xde.errors import JobError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("frameworks")]


def check(build: Any, **given: Any) -> Job:
    """Compare Lightning's own loop with a run of the module's job."""
    arguments = trainer_arguments(**given)
    theirs = fit(seeded(build), Images(), arguments)
    job = from_lightning(build, Images, trainer=arguments)
    trained = train_here(job, seed=SEED)
    check_same(trained.module, theirs, _start(job))
    return job


def _start(job: Job) -> nn.Module:
    torch.manual_seed(SEED)
    return job.model()


# --- the same weights -----------------------------------------------------------------------------


def test_a_network_with_batch_norm_ends_with_the_weights_of_lightnings_own_loop() -> None:
    check(Normed)


def test_a_module_with_warm_up_and_clipping() -> None:
    check(Warmed, gradient_clip_val=0.05)


def test_accumulation_is_several_batches_a_step() -> None:
    # Eleven batches: Lightning divides the last, short step by four all the same.
    arguments = trainer_arguments(accumulate_grad_batches=4, limit_train_batches=8)
    theirs = fit(seeded(Warmed), Images(), arguments)
    few = DataLoader(torch.utils.data.Subset(tiny_modules.images(), range(32)), batch_size=4)
    job = from_lightning(Warmed, lambda: few, trainer=trainer_arguments(accumulate_grad_batches=4))
    check_same(train_here(job, seed=SEED).module, theirs, _start(job))


@pytest.mark.parametrize(
    "schedule", [{"frequency": 3}, {"interval": "epoch"}, {"interval": "epoch", "frequency": 2}]
)
def test_schedules_move_by_steps_or_epochs_as_they_do_there(schedule: dict[str, Any]) -> None:
    check(lambda: Warmed(**schedule), max_epochs=4)


def test_a_step_that_asks_where_it_is_gets_the_same_answers_as_there() -> None:
    check(Annealed)


def test_a_limit_of_steps() -> None:
    check(Warmed, max_steps=17, max_epochs=-1)


def test_the_other_package_of_lightning_is_as_good() -> None:
    class Plain(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(64, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = cross_entropy(self.net(batch[0].flatten(1)), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.3)

    loader = DataLoader(tiny_modules.images(), batch_size=8)
    arguments = trainer_arguments(max_epochs=2)
    theirs = seeded(Plain)
    pytorch_lightning.Trainer(
        **arguments,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(theirs, loader)
    job = from_lightning(Plain, lambda: loader, trainer=arguments)
    check_same(train_here(job, seed=SEED).module, theirs, _start(job))


def test_a_module_outside_of_the_function_is_trained_and_every_node_has_a_copy() -> None:
    outside = seeded(Warmed)
    job = from_lightning(lambda: outside, Images, trainer=trainer_arguments())
    assert job.model() is outside
    assert job.model() is not outside


# --- data -----------------------------------------------------------------------------------------


class OwnLoaders(Warmed):
    """A module that has its own loaders, and changes batches on their way."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tiny_modules.images(), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


def test_loaders_and_batch_hooks_of_the_module() -> None:
    arguments = trainer_arguments()
    theirs = fit(seeded(OwnLoaders), None, arguments)
    job = from_lightning(OwnLoaders, trainer=arguments)
    check_same(train_here(job, seed=SEED).module, theirs, _start(job))


class Doubled(Images):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


def test_batch_hooks_of_the_data_module() -> None:
    arguments = trainer_arguments()
    theirs = fit(seeded(Warmed), Doubled(), arguments)
    job = from_lightning(Warmed, Doubled, trainer=arguments)
    check_same(train_here(job, seed=SEED).module, theirs, _start(job))


def test_the_data_module_is_prepared_and_set_up_once() -> None:
    made: list[Images] = []

    def build() -> Images:
        made.append(Images())
        return made[-1]

    job = from_lightning(Normed, build, trainer=trainer_arguments(max_epochs=1))
    train_here(job, seed=SEED)
    assert [each.prepared for each in made] == [1]


class Pair(NamedTuple):
    pictures: Tensor
    labels: Tensor


class OfPairs(Warmed):
    def training_step(self, batch: Any) -> Any:
        return cross_entropy(self.net(batch.pictures), batch.labels)


def test_batches_may_have_types_of_the_users_own_file() -> None:
    def collate(rows: list[Any]) -> Pair:
        return Pair(torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]))

    loader = DataLoader(tiny_modules.images(), batch_size=8, collate_fn=collate)
    job = from_lightning(OfPairs, lambda: loader, trainer=trainer_arguments(max_epochs=1))
    assert len(train_here(job).losses) == 6


def test_several_loaders_are_refused() -> None:
    loader = DataLoader(tiny_modules.images())

    class Several(Images):
        def train_dataloader(self) -> Any:
            return {"a": loader, "b": loader}

    with pytest.raises(JobError, match="loader of training batches is a dict") as refused:
        from_lightning(Normed, Several).data()
    assert refused.value.code == "W5-295"


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_epochs": 5}, {"epochs": 5, "batches_per_step": 1, "clip_norm": None, "precision": "fp32"}),
        ({}, {"epochs": 1000}),
        ({"max_steps": 70}, {"steps": 70, "epochs": None}),
        ({"max_time": "00:01:30:10"}, {"seconds": 5410.0, "epochs": None}),
        ({"max_time": {"hours": 2}}, {"seconds": 7200.0}),
        ({"accumulate_grad_batches": 3, "devices": 4, "num_nodes": 2}, {"batches_per_step": 24}),
        ({"devices": [0, 2]}, {"batches_per_step": 2}),
        ({"devices": "auto"}, {"batches_per_step": 1}),
        ({"gradient_clip_val": 0.5}, {"clip_norm": 0.5}),
        ({"precision": "bf16-mixed"}, {"precision": "bf16"}),
        ({"accelerator": "cpu"}, {"devices": "cpu"}),
        ({"val_check_interval": 0.5}, {"evaluate_every": 6}),
        ({"val_check_interval": 5}, {"evaluate_every": 5}),
        ({"check_val_every_n_epoch": 3}, {"evaluate_every": 33}),
        ({"strategy": "ddp", "devices": 2, "check_val_every_n_epoch": 2}, {"evaluate_every": 12}),
    ],
)
def test_the_arguments_of_the_trainer_are_the_defaults_of_the_run(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = settings_of(from_lightning(Normed, Images, trainer=given))
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_seed_of_seed_everything_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    pl.seed_everything(123, verbose=False)
    assert settings_of(from_lightning(Normed, Images)).seed == 123


def test_a_flag_beats_the_trainer_and_the_schedule_follows() -> None:
    job = from_lightning(Warmed, Images, trainer=trainer_arguments())
    trained = train_here(job, epochs=2, batches_per_step=4, seed=SEED)
    assert len(trained.losses) == 2 * 3
    assert trained.learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.7**2)


# --- validation -----------------------------------------------------------------------------------


def test_validation_finds_what_lightnings_own_finds() -> None:
    job = from_lightning(Normed, Images, trainer=trainer_arguments())
    module = _start(job)
    assert job.evaluate is not None
    found = job.evaluate(module)
    data = Images()
    data.prepare_data()
    data.setup("fit")
    module.eval()
    pictures, labels = data.images.tensors
    with torch.no_grad():
        answers = module(pictures)
    assert found == {
        "val_loss": pytest.approx(float(cross_entropy(answers, labels)), rel=1e-5),
        "accuracy": pytest.approx(float((answers.argmax(1) == labels).float().mean())),
    }
    assert job.evaluate(module) == found


def test_validation_may_be_limited_or_turned_off() -> None:
    assert from_lightning(Normed, Images, trainer={"limit_val_batches": 0}).evaluate is None
    assert from_lightning(Warmed, Images).evaluate is None
    loader = DataLoader(tiny_modules.images())
    assert from_lightning(Normed, lambda: loader).evaluate is None
    assert from_lightning(Normed, lambda: (loader, loader)).evaluate is not None


# --- refusals -------------------------------------------------------------------------------------


class Manual(Warmed):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Warmed):
    def on_train_epoch_end(self) -> None: ...

    def on_after_backward(self) -> None: ...


class Iterated(Warmed):
    def training_step(self, dataloader_iter: Any) -> Any: ...  # type: ignore[override]


class Unconfigured(pl.LightningModule):
    def training_step(self, batch: Any) -> Any: ...


@pytest.mark.parametrize(
    ("build", "given", "code", "sentence"),
    [
        (Manual, {}, "W5-293", "automatic_optimization = False"),
        (Hooked, {}, "W5-293", "Hooked overrides on_after_backward, on_train_epoch_end"),
        (Iterated, {}, "W5-293", "training_step takes dataloader_iter"),
        (Unconfigured, {}, "W5-294", "Unconfigured has no configure_optimizers"),
        (lambda: nn.Linear(2, 2), {}, "W5-291", "returns a Linear"),
        (Warmed, {"max_epoch": 3}, "W5-292", "no argument 'max_epoch'"),
        (Warmed, {"precision": "16-mixed"}, "W5-292", "precision='16-mixed'"),
        (Warmed, {"strategy": "fsdp"}, "W5-292", "strategy='fsdp'"),
        (Warmed, {"gradient_clip_algorithm": "value"}, "W5-292", "gradient_clip_algorithm='value'"),
        (Warmed, {"limit_train_batches": 0.5}, "W5-292", "limit_train_batches=0.5"),
        (Warmed, {"fast_dev_run": True}, "W5-292", "fast_dev_run=True"),
        (Warmed, {"accelerator": "tpu"}, "W5-292", "accelerator='tpu'"),
        (
            Warmed,
            {"callbacks": [pl.callbacks.StochasticWeightAveraging(0.1)]},
            "W5-293",
            "StochasticWeightAveraging",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name_with_the_way_out(
    build: Any, given: dict[str, Any], code: str, sentence: str
) -> None:
    with pytest.raises(JobError, match=sentence) as refused:
        from_lightning(build, Images, trainer=given)
    assert refused.value.code == code
    assert refused.value.fix


def test_a_hook_that_need_not_be_called_can_be_named() -> None:
    with pytest.raises(JobError, match="Hooked overrides on_after_backward, which"):
        from_lightning(Hooked, Images, skip_hooks=["on_train_epoch_end"])
    from_lightning(Hooked, Images, skip_hooks=["on_train_epoch_end", "on_after_backward"])


def test_a_callback_that_changes_gradients_is_refused() -> None:
    class Clips(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None: ...

    with pytest.raises(JobError, match="Clips overrides on_before_optimizer_step"):
        from_lightning(Warmed, Images, trainer={"callbacks": Clips()})


class TwoOptimizers(Warmed):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.Adam(self.parameters())]


class OnPlateau(Warmed):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class Nothing(Warmed):
    def training_step(self, batch: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("build", "code", "sentence"),
    [
        (TwoOptimizers, "W5-294", r"2 optimizers \(SGD, Adam\)"),
        (OnPlateau, "W5-294", "ReduceLROnPlateau"),
        (Nothing, "W5-296", "training_step returned NoneType"),
    ],
)
def test_what_shows_only_when_it_is_built_is_refused_then(build: Any, code: str, sentence: str) -> None:
    job = from_lightning(build, Images, trainer=trainer_arguments())
    with pytest.raises(JobError) as refused:
        train_here(job)
    causes = [refused.value, refused.value.__cause__]
    assert any(isinstance(each, JobError) and each.code == code for each in causes)


def test_an_attribute_of_the_trainer_that_nodes_cannot_know_is_named() -> None:
    class Curious(Warmed):
        def training_step(self, batch: Any) -> Any:
            return self.trainer.optimizers

    job = from_lightning(Curious, Images, trainer=trainer_arguments())
    with pytest.raises(JobError) as refused:
        train_here(job)
    assert "self.trainer.optimizers is not known where nodes compute" in refused.value.why


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda: (Warmed(), Images), "given a Warmed itself"),
        (lambda: (Warmed, Images()), "given a Images itself"),
        (lambda: (Warmed, (1, 2)), "given a tuple itself"),
    ],
)
def test_an_object_in_place_of_a_function_is_refused_with_the_lambda(given: Any, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence) as refused:
        from_lightning(*given())
    assert refused.value.code == "W5-291"
    assert "from_lightning(lambda: Lit(…), lambda: Data(…))" in refused.value.fix
