"""The code of a job, which travels to nodes that have no copy of it."""
