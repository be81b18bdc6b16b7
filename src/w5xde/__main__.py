"""`python -m w5xde`."""

from w5xde.cli.main import run

run()
