"""Measurements: what w5xde costs, and what it gains, on the machine they run on."""
