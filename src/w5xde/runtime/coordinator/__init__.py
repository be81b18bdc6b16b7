"""The coordinator process: peers, lending, updates, steps."""
