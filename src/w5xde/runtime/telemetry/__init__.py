"""Telemetry: meters, samples of the machine, traffic, status and callbacks."""
