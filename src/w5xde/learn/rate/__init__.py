"""The learning rate: scaled for large steps, changed by a user, stepped by a metric."""
