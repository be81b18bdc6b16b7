"""Trust: which updates are accepted, when a node is evicted, and how a step is taken back."""
