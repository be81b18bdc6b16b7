"""Admission: identity, tickets, credentials and names; which node may join."""
