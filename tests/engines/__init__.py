"""Tests on real clusters: `make engines` installs what they need and runs them; `make test` does not."""
