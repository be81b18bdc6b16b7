"""What people see: help, the live display, logs, notebooks."""
