"""Small LightningModules with their data: a network with BatchNorm, and one that warms up and clips."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 44
SEED = 11


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
    return TensorDataset(pictures, (pictures.sum((1, 2, 3)) > 0).long())


class Images(pl.LightningDataModule):
    """Data that exist only once they are prepared and set up, as Lightning promises."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1

    def setup(self, stage: str) -> None:
        if not self.prepared:
            raise RuntimeError("not prepared")
        self.images = images()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.images, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.images, batch_size=5)


class Normed(pl.LightningModule):
    """A convolution with BatchNorm, a metric, a layer that `setup` makes, and groups of parameters."""

    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.seen = torchmetrics.MeanMetric()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=2, average="micro")

    def setup(self, stage: str) -> None:
        self.head = nn.Linear(144, 2)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.body(pictures))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, labels = batch
        loss = cross_entropy(self(pictures), labels)
        self.seen(loss.detach())
        self.log("seen", self.seen)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self(batch[0])
        self.accuracy(found, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", cross_entropy(found, batch[1]))

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.body.parameters(), "lr": self.hparams.rate / 2},
            {"params": self.head.parameters()},
        ]
        return torch.optim.SGD(groups, lr=self.hparams.rate, momentum=0.9)


class Warmed(pl.LightningModule):
    """Warms up over a part of all steps, then goes down by epochs; returns its loss in a dict."""

    def __init__(self, **schedule: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 2))
        self.schedule = schedule

    def training_step(self, batch: Any) -> dict[str, Any]:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log_dict({"loss": loss, "twice": 2 * loss}, on_step=True, on_epoch=True)
        return {"loss": loss, "labels": batch[1]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = int(self.trainer.estimated_stepping_batches)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=steps // 3)
        down = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return [optimizer], [{"scheduler": warm, "interval": "step", **self.schedule}, down]


class Annealed(Warmed):
    """A loss that depends on the place in the run, and on the number of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        share = self.global_step / self.trainer.estimated_stepping_batches
        loss = cross_entropy(self.net(batch[0]), batch[1])
        return (
            loss * (1 + share)
            + 0.01 * (batch_idx + 1) * (self.current_epoch + 1) * self.net[1].weight.square().sum()
        )


def trainer_arguments(**given: Any) -> dict[str, Any]:
    return {"max_epochs": 3, "accelerator": "cpu", "devices": 1, **given}


def fit(module: pl.LightningModule, data: Any, arguments: dict[str, Any]) -> pl.LightningModule:
    """Let Lightning's own loop train a module."""
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    pl.Trainer(**{**arguments, **quiet}).fit(module, data)
    return module


def seeded(build: Any) -> Any:
    """Build a module under the seed of these tests."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(SEED)
    return build()
