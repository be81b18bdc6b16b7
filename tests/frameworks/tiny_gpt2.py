"""A tiny GPT-2 over texts of different lengths, padded, with masked labels; and Trainers for it.

Without dropout, whose random numbers are those of each batch here, and of the whole run there. In double
precision, and with a larger epsilon than usual: the gradient of a key's bias is zero but for rounding (losses
of language models are computed in single precision), which Adam would blow up.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY = 40
TEXTS = 26
IGNORED = -100


class Texts(Dataset[dict[str, Any]]):
    """Texts of 3 to 12 tokens, of which some are not to be predicted, and a column that no model wants."""

    def __init__(self, seed: int = 5) -> None:
        chance = random.Random(seed)
        self._rows = [
            [chance.randrange(VOCABULARY) for _ in range(chance.randrange(3, 13))] for _ in range(TEXTS)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"input_ids": self._rows[number], "prompt": number % 3, "comment": "unused"}


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, padded to its longest text; the first tokens and the padding are not predicted."""
    width = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    attention, labels = torch.zeros_like(tokens), torch.full_like(tokens, IGNORED)
    for place, row in enumerate(rows):
        text = torch.tensor(row["input_ids"])
        tokens[place, : len(text)] = text
        attention[place, : len(text)] = 1
        hidden = row.get("prompt", 0)
        labels[place, hidden : len(text)] = text[hidden:]
    return {"input_ids": tokens, "attention_mask": attention, "labels": labels}


def small() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "adam_epsilon": 1e-5,
    }
    return TrainingArguments(**{**usual, **given})


def trainer(folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """A Trainer; what begins with an underscore is for the Trainer, all else for its arguments."""
    own = {name.removeprefix("_"): value for name, value in given.items() if name.startswith("_")}
    others = {name: value for name, value in given.items() if not name.startswith("_")}
    if "model" not in own:
        own.setdefault("model_init", small)
    own.setdefault("data_collator", pad)
    own.setdefault("train_dataset", Texts())
    # The column of prompts must reach the collator.
    others.setdefault("remove_unused_columns", False)
    return kind(args=arguments(folder, **others), **own)
