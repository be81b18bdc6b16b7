"""The machine: threads that own one object, cores and memory."""
