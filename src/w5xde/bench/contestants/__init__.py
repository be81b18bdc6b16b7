"""Contestants: our own runs, DDP, Ray, light nodes, and what the machine allows."""
