"""`w5xde.Pool`: nodes for a training loop of the user's own."""
