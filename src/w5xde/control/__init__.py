"""Decisions: events and `now` in, effects out. No sockets, tensors, clocks or randomness inside."""
