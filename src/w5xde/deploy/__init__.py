"""`w5xde deploy`: files with which an engine of a cluster or a machine starts, restarts and ends a run.

An engine minds processes, and the run is kept by the commands that a user would type: `w5xde serve` and
`w5xde join`. Starts nothing, and knows no torch.
"""
