"""Durable storage: ledger, checkpoints, step log, run folder, resume, audit and export."""
