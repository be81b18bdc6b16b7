"""A simulated pool: the real cores under virtual time, seeded faults, and books that are audited after every event."""
