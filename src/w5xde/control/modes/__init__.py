"""Modes: which batches a node is lent and when a step is complete, in sync, async and robust training."""
