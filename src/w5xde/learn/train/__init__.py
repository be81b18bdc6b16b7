"""Training on a node: forward and backward of the batches of a lease."""
