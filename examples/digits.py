"""Handwritten digits: the job of the README, measured on digits it has never seen.

    w5xde train examples/digits.py --nodes 3 --batches-per-step 4 --epochs 20

20 epochs are 240 steps of 128 digits: a second of training, and 96 to 98 % of the test digits by seed.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import w5xde
from w5xde.datasets import digits


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def loss(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


def evaluate(model):
    images, labels = digits("test").tensors
    return {"accuracy": (model(images).argmax(1) == labels).float().mean().item()}


def optimizer(params):
    return torch.optim.Adam(params, lr=0.003)


job = w5xde.Job(model=model, data=digits, loss=loss, optimizer=optimizer, evaluate=evaluate)
