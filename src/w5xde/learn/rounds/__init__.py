"""Rounds mode: the columns that nodes compute, and the replica and optimizer's state they start from."""
