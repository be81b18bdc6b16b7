"""Showing results: tables, figures with units, plots."""
