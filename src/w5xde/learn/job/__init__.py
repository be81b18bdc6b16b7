"""The user's job: how it is found, built, tried once and prepared on the coordinator and on a node."""
