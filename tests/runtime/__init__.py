"""Tests of what performs decisions: connections, recorder and view, without other processes."""
