"""Connections: listening, dialing, TLS and frames over sockets."""
