"""Tests of `w5xde deploy slurm` on a real Slurm, all of whose daemons run on this machine."""
