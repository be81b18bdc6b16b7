"""Data: the samples of a batch, and how a batch becomes bytes."""
