"""Evaluating: results of the job's evaluation, who hears of them, and the weights that they measured."""
