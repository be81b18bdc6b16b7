"""Steps: which batches make a step, who holds them, which are in, and when a step is saved."""
