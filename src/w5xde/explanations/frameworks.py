"""Codes 29x: jobs that are read from Lightning and Hugging Face."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

FRAMEWORKS = [
    Explanation(
        "W5-290",
        "a package of a framework is missing",
        "from_trainer needs transformers and accelerate, from_lightning needs lightning, on every machine"
        " of the run. w5xde itself needs neither.",
        "install the extra, on this machine too.",
        'pip install "w5xde[hf]"\npip install "w5xde[lightning]"',
    ),
    Explanation(
        "W5-291",
        "from_trainer or from_lightning got something else",
        "both take functions, which every process of the run calls: one that returns a transformers.Trainer,"
        " or one that returns a LightningModule.",
        "put lambda: in front of what you would train.",
        "job = w5xde.from_trainer(lambda: Trainer(model_init=build, args=arguments, train_dataset=data))",
    ),
    Explanation(
        "W5-292",
        "an argument of the framework's Trainer cannot be used",
        "it belongs to a loop that does not run here, or to hardware that a pool does not have; ignoring it"
        " would train something else. docs/porting.md lists which arguments are used, and how.",
        "change it as the message says; or keep your loop, whose gradients nodes can compute for w5xde.Pool.",
        'job = w5xde.from_lightning(lambda: Lit(), lambda: Data(), trainer={"precision": "bf16-mixed"})',
    ),
    Explanation(
        "W5-293",
        "the module or the Trainer overrides something that would not be called",
        "nodes compute the gradients of batches, and the coordinator steps the optimizer once for all."
        " So there is no place for hooks between backward and step, for optimizer steps inside of"
        " training_step, or for hooks of the framework's loop.",
        "move the work into training_step or compute_loss; say that Lightning need not call the hook; or keep"
        " your loop, and let nodes compute its gradients with w5xde.Pool.",
        'job = w5xde.from_lightning(lambda: Lit(), lambda: Data(), skip_hooks=["on_train_epoch_end"])',
    ),
    Explanation(
        "W5-294",
        "the framework's optimizer or schedule cannot be used",
        "a run steps one optimizer, and its schedule by steps or by epochs of a known length.",
        "return one optimizer, with parameter groups if need be, and a schedule that needs no metric (for"
        " ReduceLROnPlateau write a w5xde.Job with scheduler=, which supports it); say how many steps there"
        " are if the data set is a stream.",
        "def configure_optimizers(self):\n"
        "    optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)\n"
        "    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)\n"
        "    return [optimizer], [schedule]",
    ),
    Explanation(
        "W5-295",
        "the framework's data cannot be used",
        "training reads one data set, in which every sample counts once an epoch, and a batch of a Trainer is"
        " a dict of the model's inputs, with labels if its loss is divided by their number.",
        "combine data sets into one, return a DataLoader, and let the collator make a dict.",
        "def train_dataloader(self):\n    return DataLoader(ConcatDataset([self.first, self.second]), 32)",
    ),
    Explanation(
        "W5-296",
        "training_step returned no loss",
        "Lightning would skip the batch, and here every sample counts once.",
        "return a tensor, or a dict with a tensor under loss; leave samples out by a mask in the loss.",
        'def training_step(self, batch, batch_idx):\n    return {"loss": self.loss(batch)}',
    ),
]
