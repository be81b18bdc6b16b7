"""Steps: which batches make a step, which nodes hold them, which are answered, and when a step is saved."""
