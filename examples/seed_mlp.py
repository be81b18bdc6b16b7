"""The benchmark of the first WIIIIIDE, which never got below the loss of guessing. This one learns.

    w5xde train examples/seed_mlp.py --nodes 10 --batches-per-step 8 --steps 1000
    w5xde train examples/seed_mlp.py --nodes 10 --mode async --steps 5000

A thousand samples of ten normal numbers; the label is the last digit of their sum, rounded down. With 430
parameters hardly anything is computed, so what is measured is everything around it.

Steps until the loss over all samples is below 1.0 and below 0.6, and the loss in the end, in a plain loop
in one process (three seeds; two for gradients that come late):

    8 batches a step                          150-225     325-450    0.18-0.24 after 2,000
    1 batch a step                            425-625    850-1500    0.25-0.40 after 3,000
    1 batch a step, gradients 10 steps late  900-1000   1650-1850    0.16-0.17 after 8,000
    1 batch a step, gradients 30 steps late 2000-2100   3550-4950    0.35-0.46 after 8,000

With gradients 60 steps late it is still at 1.25-1.33 after 8,000: bound the staleness, or lower the rate.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import w5xde


def model():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))


def data():
    numbers = torch.randn(1000, 10, generator=torch.Generator().manual_seed(0))
    # Floor before the remainder: in floats, a sum just below zero has remainder 10.0, which is no class.
    return TensorDataset(numbers, numbers.sum(1).floor().long() % 10)


def loss(model, batch):
    numbers, labels = batch
    return cross_entropy(model(numbers), labels)


def optimizer(params):
    # No momentum (the first beta): gradients that come late in async mode already act like one, and with
    # both it diverges. Fused: one call per step instead of dozens, which a model this small would feel.
    return torch.optim.Adam(params, lr=0.02, betas=(0.0, 0.99), fused=True)


def scheduler(optimizer):
    # Fast at first, then ever finer; without an end, so that any number of steps will do.
    return LambdaLR(optimizer, lambda step: (1 + step / 250) ** -0.5)


job = w5xde.Job(model=model, data=data, loss=loss, optimizer=optimizer, scheduler=scheduler)
