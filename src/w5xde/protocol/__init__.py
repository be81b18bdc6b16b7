"""Bytes and manners: what a frame looks like, and what may be said when."""
