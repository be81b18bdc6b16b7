"""The command line: parsing, printing, and the live view."""
