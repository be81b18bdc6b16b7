"""Checks of what a node computes: the canary at join, and batches computed a second time."""
