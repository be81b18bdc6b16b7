"""The model as one flat vector: its layout, buffers, digest, device and random seeds."""
