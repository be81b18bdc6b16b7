"""Follows a run by the files in its folder, whether it is going on, has crashed or is over.

Knows no torch.
"""
