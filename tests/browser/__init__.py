"""Tests of the page in Chromium: `make browser` runs them, and `make test` does not: they need a browser."""
