"""Calls of a pool: the model and the optimizers are the caller's."""
