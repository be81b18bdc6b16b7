"""Arithmetic: the only place that imports torch. No sockets and no clock."""
