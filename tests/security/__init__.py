"""Tests of who may join and whom to trust: tickets, keys on disk, the register, TLS."""
