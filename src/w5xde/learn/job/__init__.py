"""The user's job: found by name, built, tried on its first batch, and set up on the coordinator and on nodes.

Knows no sockets and no processes.
"""
