"""Modes: who is lent what and when a step is complete, in sync, async and robust training."""
