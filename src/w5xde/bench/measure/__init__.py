"""Measuring: processes with a deadline, CPU and memory, pairs of runs, ratios, slow links. Shows nothing."""
