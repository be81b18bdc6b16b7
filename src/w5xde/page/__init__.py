"""The page: shows a run in a browser. A process of its own, which reads the run folder and changes nothing.

The coordinator knows nothing of it, and nothing happens to a run if its page dies.
"""
