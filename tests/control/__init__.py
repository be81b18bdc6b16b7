"""Tests of the decisions: no sockets, no tensors, no clock."""
