"""Telemetry: what a run and a node did, counted, sampled, summarised and passed to the user's callbacks.

Knows nothing of the bodies of coordinator and node: they call it.
"""
