"""`python -m w5xde`."""

from w5xde.cli import run

run()
