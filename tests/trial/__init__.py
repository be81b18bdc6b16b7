"""Training scripts as people have them, tried: each as its plain loop, and with w5xde for 1, 2 and 7 nodes.

`python -m tests.trial` measures all of them, and prints the table of docs/porting.md.
"""
