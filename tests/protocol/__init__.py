"""Bytes and manners: frames at every split, and words only when they may be said."""
