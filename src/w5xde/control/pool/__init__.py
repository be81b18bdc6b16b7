"""The pool: the nodes of a run, whose turn it is on one machine, and which connections are accepted."""
