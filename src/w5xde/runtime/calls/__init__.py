"""Calls: a coordinator that computes gradients for the user's own loop, on a thread of its own."""
