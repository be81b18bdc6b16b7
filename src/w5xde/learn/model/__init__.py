"""The model as one flat vector: its layout, its digest, and the memory, devices, cores and seeds it needs.

Knows nothing of training, data or sockets.
"""
