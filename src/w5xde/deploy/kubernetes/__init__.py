"""Kubernetes: a Job for the coordinator, a Job for the nodes, and what they need."""
