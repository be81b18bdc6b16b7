"""Tests on a real Ray cluster of several raylets on this machine."""
