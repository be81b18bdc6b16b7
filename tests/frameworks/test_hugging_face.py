"""A Hugging Face Trainer as a job: the weights of its own loop, and the same bits whichever nodes help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, set_seed

from tests.frameworks import tiny_gpt2
from tests.frameworks.compare import check_same, settings_of, train_here
from w5xde import from_trainer
from w5xde.errors import JobError

WITH_TEXTS = {"_eval_dataset": tiny_gpt2.Texts()}
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("frameworks")]


def own_weights(trainer: Trainer) -> tuple[nn.Module, nn.Module]:
    """Let the Trainer's own loop train; the model before and after."""
    set_seed(trainer.args.seed)
    start = tiny_gpt2.small()
    trainer.train()
    return start, trainer.model


def check(folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> None:
    """Compare a Trainer's own loop with a run of its job."""
    start, theirs = own_weights(tiny_gpt2.trainer(folder, kind, **given))
    trained = train_here(from_trainer(lambda: tiny_gpt2.trainer(folder, kind, **given)))
    check_same(trained.module, theirs, start)


# --- the same weights -----------------------------------------------------------------------------


def test_padded_texts_weigh_by_their_tokens_as_in_the_trainers_own_loop(tmp_path: Path) -> None:
    # 7 batches an epoch, 3 in a step: the last step is short, and so is the last batch.
    check(tmp_path, gradient_accumulation_steps=3, warmup_steps=2, weight_decay=0.1)


def test_without_accumulation(tmp_path: Path) -> None:
    check(tmp_path, optim="adamw_torch", lr_scheduler_type="cosine", warmup_steps=0.2)


def test_without_clipping_and_with_sgd_that_shows_every_factor(tmp_path: Path) -> None:
    check(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0, optim="sgd", learning_rate=0.5)


def test_clipping_at_one_is_the_trainers_default(tmp_path: Path) -> None:
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, optim="sgd", learning_rate=5.0))
    assert settings_of(job).clip_norm == 1.0
    check(tmp_path, gradient_accumulation_steps=2, optim="sgd", learning_rate=5.0)


def test_label_smoothing(tmp_path: Path) -> None:
    check(tmp_path, gradient_accumulation_steps=2, label_smoothing_factor=0.1, optim="sgd")


def test_a_loss_function_of_the_users_that_is_divided_by_the_items_of_a_step(tmp_path: Path) -> None:
    def squared(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits[labels != tiny_gpt2.IGNORED].square().sum() / num_items_in_batch

    check(tmp_path, gradient_accumulation_steps=2, _compute_loss_func=squared)


class MeanOfBatches(Trainer):
    """A Trainer whose loss is the mean of a batch, however many tokens that has."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        labels = inputs.pop("labels")
        found = model(**inputs).logits
        return nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_trainer_whose_batches_count_alike(tmp_path: Path) -> None:
    check(tmp_path, MeanOfBatches, gradient_accumulation_steps=3, optim="sgd", learning_rate=0.5)


class OwnOptimizer(Trainer):
    """A Trainer that creates its own optimizer and schedule."""

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(
            optimizer or self.optimizer, num_training_steps
        )
        return self.lr_scheduler


def test_a_trainer_that_creates_its_own_optimizer_and_schedule(tmp_path: Path) -> None:
    check(tmp_path, OwnOptimizer, gradient_accumulation_steps=2)


def test_gradient_checkpointing_computes_the_same(tmp_path: Path) -> None:
    check(tmp_path, gradient_checkpointing=True, optim="sgd", learning_rate=0.5)


def test_steps_and_parts_of_an_epoch_limit_the_run_as_they_do_there(tmp_path: Path) -> None:
    check(tmp_path, max_steps=5, gradient_accumulation_steps=2)
    check(tmp_path, num_train_epochs=1.4, gradient_accumulation_steps=2)


def test_a_short_last_batch_that_is_dropped(tmp_path: Path) -> None:
    check(tmp_path, dataloader_drop_last=True, gradient_accumulation_steps=2)


def test_texts_in_order_and_grouped_by_length(tmp_path: Path) -> None:
    check(tmp_path, train_sampling_strategy="sequential")
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, train_sampling_strategy="group_by_length"))
    assert train_here(job, epochs=1).losses


# --- models and optimizers that exist outside -----------------------------------------------------


def test_a_model_outside_of_the_function_is_trained_and_every_node_has_a_copy(tmp_path: Path) -> None:
    def built() -> nn.Module:
        set_seed(42)
        return tiny_gpt2.small()

    theirs = tiny_gpt2.trainer(tmp_path, _model=built())
    theirs.train()
    outside = built()
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, _model=outside))
    first = job.model()
    assert first is outside
    assert job.model() is not outside
    trained = train_here(from_trainer(lambda: tiny_gpt2.trainer(tmp_path, _model=built())))
    check_same(trained.module, theirs.model, built())


def with_optimizer(folder: Path) -> Trainer:
    set_seed(42)
    model = tiny_gpt2.small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return tiny_gpt2.trainer(folder, _model=model, _optimizers=(optimizer, schedule))


def test_an_optimizer_and_a_schedule_that_were_given(tmp_path: Path) -> None:
    theirs = with_optimizer(tmp_path)
    theirs.train()
    set_seed(42)
    trained = train_here(from_trainer(lambda: with_optimizer(tmp_path)))
    check_same(trained.module, theirs.model, tiny_gpt2.small())


def test_an_optimizer_that_was_given_is_that_of_one_model(tmp_path: Path) -> None:
    with pytest.raises(JobError) as refused:
        train_here(from_trainer(lambda: with_optimizer(tmp_path)), mode="rounds", local_steps=2)
    assert refused.value.code == "W5-294"


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {},
            {
                "batch_size": 4,
                "batches_per_step": 1,
                "epochs": 2,
                "steps": None,
                "clip_norm": 1.0,
                "seed": 42,
            },
        ),
        ({"gradient_accumulation_steps": 8}, {"batches_per_step": 8}),
        ({"max_steps": 30}, {"steps": 30, "epochs": None}),
        ({"num_train_epochs": 1.5, "gradient_accumulation_steps": 2}, {"steps": 6, "epochs": 2}),
        ({"max_grad_norm": 0.0}, {"clip_norm": None}),
        ({"bf16": True}, {"precision": "bf16"}),
        ({"seed": 7}, {"seed": 7}),
        ({"dataloader_num_workers": 2}, {"loader_workers": 2}),
        ({"dataloader_drop_last": True}, {"drop_last": True}),
        (
            {"eval_strategy": "steps", "eval_steps": 3, "_eval_dataset": tiny_gpt2.Texts()},
            {"evaluate_every": 3},
        ),
        (
            {"eval_strategy": "steps", "eval_steps": 0.5, "_eval_dataset": tiny_gpt2.Texts()},
            {"evaluate_every": 7},
        ),
        ({"eval_strategy": "epoch", "_eval_dataset": tiny_gpt2.Texts()}, {"evaluate_every": None}),
    ],
)
def test_the_arguments_of_the_trainer_are_the_defaults_of_the_run(
    tmp_path: Path, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = settings_of(from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **given)))
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_flag_beats_the_trainer_and_its_schedule_follows(tmp_path: Path) -> None:
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, lr_scheduler_type="linear", optim="sgd"))
    trained = train_here(job, epochs=3, batches_per_step=2)
    assert len(trained.losses) == 3 * 4
    assert trained.learner.optimizer.param_groups[0]["lr"] == 0.0


# --- evaluation -----------------------------------------------------------------------------------


def test_an_evaluation_finds_what_the_trainers_own_finds(tmp_path: Path) -> None:
    def accuracy(found: Any) -> dict[str, float]:
        known = found.label_ids[:, 1:] != tiny_gpt2.IGNORED
        right = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
        return {"accuracy": float(right[known].mean())}

    given: dict[str, Any] = {
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 5,
        "_eval_dataset": {"near": tiny_gpt2.Texts(), "far": tiny_gpt2.Texts(9)},
        "_compute_metrics": accuracy,
    }
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **given))
    theirs = tiny_gpt2.trainer(tmp_path, **given)
    expected = theirs.evaluate()
    assert job.evaluate is not None
    found = job.evaluate(theirs.model)
    assert set(found) == {"eval_near_loss", "eval_near_accuracy", "eval_far_loss", "eval_far_accuracy"}
    assert found == {name: pytest.approx(expected[name], rel=1e-9) for name in found}


def test_a_trainer_that_would_not_evaluate_does_not(tmp_path: Path) -> None:
    assert from_trainer(lambda: tiny_gpt2.trainer(tmp_path)).evaluate is None


# --- refusals -------------------------------------------------------------------------------------


class OnDevice(Trainer):
    """As if this machine had a GPU, and the arguments did not say use_cpu=True."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        vars(self.args)["_setup_devices"] = torch.device("cuda:0")


class OwnStep(Trainer):
    def training_step(self, *given: Any, **more: Any) -> Tensor:
        return super().training_step(*given, **more)


@pytest.mark.parametrize(
    ("given", "code", "sentence"),
    [
        ({"auto_find_batch_size": True}, "W5-292", "auto_find_batch_size=True"),
        ({"neftune_noise_alpha": 5.0}, "W5-292", "neftune_noise_alpha=5.0"),
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "W5-292",
            "train_sampling_strategy='batch_rebalance'",
        ),
        ({"kind": OnDevice}, "W5-292", "use_cpu=False"),
        ({"kind": OwnStep}, "W5-293", "OwnStep overrides training_step"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name_with_the_way_out(
    tmp_path: Path, given: dict[str, Any], code: str, sentence: str
) -> None:
    with pytest.raises(JobError, match=sentence) as refused:
        from_trainer(lambda: tiny_gpt2.trainer(tmp_path, **given))
    assert refused.value.code == code
    assert refused.value.fix


def test_a_function_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="returns a GPT2LMHeadModel") as refused:
        from_trainer(tiny_gpt2.small)
    assert refused.value.code == "W5-291"


def test_a_trainer_in_place_of_a_function_is_refused_with_the_lambda(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="given a Trainer itself") as refused:
        from_trainer(tiny_gpt2.trainer(tmp_path))
    assert refused.value.code == "W5-291"
    assert "from_trainer(lambda: Trainer(…))" in refused.value.fix


def test_a_package_that_is_missing_is_told_with_the_line_to_type() -> None:
    def needs_more() -> None:
        raise ImportError("Using the Trainer with PyTorch requires accelerate")

    with pytest.raises(JobError, match="requires accelerate") as refused:
        from_trainer(needs_more)
    assert refused.value.code == "W5-290"
    assert refused.value.fix == "pip install 'w5xde[hf]'"


def test_a_batch_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    job = from_trainer(lambda: tiny_gpt2.trainer(tmp_path))
    with pytest.raises(JobError) as refused:
        job.loss(job.model(), [torch.zeros(2, 3)])
    assert refused.value.code == "W5-295"
