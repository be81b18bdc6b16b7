"""A simulated pool: the real cores under virtual time, with seeded faults, audited after every event."""
