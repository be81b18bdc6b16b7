"""Tests of the page: its guard, its stream, its files, and its process."""
